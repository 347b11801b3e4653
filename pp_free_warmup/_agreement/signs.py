"""Signs of life: publishing one's own, and judging others' by one's own clock."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pp_free_warmup._agreement.halls import PREFIX
from pp_free_warmup._agreement.mailbox import Mailbox

# A rank that lives but makes no progress is given this many timeouts: compiling one kernel can take long.
STUCK_TIMEOUTS = 6


def sign_key(rank: int) -> str:
    """Return where *rank* keeps its sign of life."""
    return f"{PREFIX}/sign of {rank}"


class Sign(NamedTuple):
    """What a rank publishes of itself.

    Attributes:
        beats: How many signs it gave; it lives while this rises.
        moves: How often it got on; it works while this rises.
        phase: What it does.
        votes: The marks of the votes that it waits in; empty while it works.
    """

    beats: int
    moves: int
    phase: str
    votes: Sequence[int] = ()

    @classmethod
    def read(cls, text: str) -> Sign:
        """Read what `text` wrote."""
        return cls(*json.loads(text))

    def text(self) -> str:
        """Write this as JSON."""
        return json.dumps(list(self))


NEVER = Sign(0, 0, "")


class Heart:
    """This rank's sign of life: a number that rises, its phase, and how often it got on.

    Safe to use from the thread that works and the one that watches.

    Args:
        mailbox: The store.
        rank: This process's global rank.
        period: Seconds between two signs.
    """

    def __init__(self, mailbox: Mailbox, rank: int, period: float) -> None:
        self._mailbox = mailbox
        self._key = sign_key(rank)
        self._period = period
        self._lock = threading.Lock()
        self._beats = 0
        self._last = -period
        self._moves = 0
        self._at: tuple[str, int, Sequence[int]] = ("before the first vote", 0, ())

    def tell(self, phase: str, progress: int = 0, votes: Sequence[int] = ()) -> None:
        """Note what this rank does now, or which votes it waits in; published with the next sign."""
        with self._lock:
            if self._at != (phase, progress, votes):
                self._at = (phase, progress, votes)
                self._moves += 1

    def move(self) -> None:
        """Note that this rank gets on, within the same phase."""
        with self._lock:
            self._moves += 1

    def beat(self, period: float | None = None) -> None:
        """Publish a sign, unless the last one is still fresh.

        Args:
            period: Seconds for which a sign is fresh; None takes the usual ones.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._last < (self._period if period is None else period):
                return
            self._last = now
            self._beats += 1
            phase, _, votes = self._at
            self._mailbox.write(self._key, Sign(self._beats, self._moves, phase, votes).text())

    def stop(self) -> None:
        """Take the sign away."""
        with self._lock:
            self._last = -self._period
            self._mailbox.forget([self._key])


class _Record(NamedTuple):
    sign: Sign
    heard: float
    moved: float
    elsewhere: bool


class Signs:
    """When other ranks were last heard of, by this rank's own clock.

    Args:
        mailbox: The store.
        timeout: Seconds after which an unchanged sign means silence.
        period: Seconds between two looks.
    """

    def __init__(self, mailbox: Mailbox, timeout: float, period: float) -> None:
        self._mailbox = mailbox
        self._timeout = timeout
        self._period = period
        self._records: dict[int, _Record] = {}
        self._looked = -period

    @property
    def due(self) -> bool:
        """True once the last look is a period ago."""
        return time.monotonic() - self._looked >= self._period

    def look(self, awaited: Mapping[int, int]) -> None:
        """Look for new signs of the awaited ranks; a rank that waits in another vote does not get on.

        Args:
            awaited: The mark of the vote in which each rank is awaited.
        """
        self._looked = time.monotonic()
        for rank, vote in awaited.items():
            text = self._mailbox.peek(sign_key(rank))
            old = self._records.get(rank)
            sign = Sign.read(text) if text is not None else NEVER if old is None else old.sign
            heard = self._looked if old is None or sign.beats != old.sign.beats else old.heard
            elsewhere = bool(sign.votes) and vote not in sign.votes
            moved = self._looked if old is None or (sign.moves != old.sign.moves and not elsewhere) else old.moved
            self._records[rank] = _Record(sign, heard, moved, elsewhere)

    def silent(self, awaited: Iterable[int]) -> dict[int, str]:
        """Say which of the awaited ranks gave no sign for too long, and what they did last."""
        found = {rank: self._silence(rank, self._records[rank]) for rank in awaited}
        return {rank: text for rank, text in found.items() if text}

    def _silence(self, rank: int, record: _Record) -> str:
        unheard, unmoved = self._looked - record.heard, self._looked - record.moved
        if unheard > self._timeout:
            if record.sign is NEVER:
                return f"rank {rank} never came to this call (waited {unheard:.0f} s)"
            return f"rank {rank} is lost: no sign of life for {unheard:.0f} s, last seen in {record.sign.phase!r}"
        if unmoved > STUCK_TIMEOUTS * self._timeout and record.elsewhere:
            return f"rank {rank} has waited in another vote than this one for {unmoved:.0f} s"
        if unmoved > STUCK_TIMEOUTS * self._timeout:
            return f"rank {rank} is alive but made no progress for {unmoved:.0f} s in {record.sign.phase!r}"
        return ""


def read_phases(mailbox: Mailbox, ranks: Iterable[int]) -> dict[int, str]:
    """Return what each of *ranks* says it does now."""
    texts = {rank: mailbox.peek(sign_key(rank)) for rank in ranks}
    return {rank: "no sign yet" if text is None else Sign.read(text).phase for rank, text in texts.items()}


def gone(mailbox: Mailbox, ranks: Iterable[int], seconds: float) -> list[int]:
    """Return those of *ranks* whose sign of life does not change for some *seconds*."""
    before = {rank: mailbox.peek(sign_key(rank)) for rank in ranks}
    time.sleep(seconds)
    return [rank for rank, text in before.items() if text is not None and mailbox.peek(sign_key(rank)) == text]
