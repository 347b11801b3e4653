"""Signs of life: publishing one's own, and judging others' by one's own clock."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from pp_free_warmup._agreement.halls import PREFIX
from pp_free_warmup._agreement.mailbox import Mailbox

# A rank that lives but makes no progress is given this many timeouts: compiling one kernel can take long.
STUCK_TIMEOUTS = 6


def sign_key(rank: int) -> str:
    """Return where *rank* keeps its sign of life."""
    return f"{PREFIX}/sign of {rank}"


class Heart:
    """This rank's sign of life: a number that rises, its phase, and how often it got on.

    Safe to use from the thread that works and the one that watches.

    Args:
        mailbox: The store.
        rank: This process's global rank.
        level: In how many groups, counted from its own stage's up, this rank has a voice, minus one.
        period: Seconds between two signs.
    """

    def __init__(self, mailbox: Mailbox, rank: int, level: int, period: float) -> None:
        self._mailbox = mailbox
        self._key = sign_key(rank)
        self._level = level
        self._period = period
        self._lock = threading.Lock()
        self._beats = 0
        self._last = -period
        self._moves = 0
        self._at: tuple[str, int] = ("", 0)

    def tell(self, phase: str, progress: int = 0) -> None:
        """Note what this rank does now; published with the next sign."""
        with self._lock:
            if self._at != (phase, progress):
                self._at = (phase, progress)
                self._moves += 1

    def move(self) -> None:
        """Note that this rank gets on, within the same phase."""
        with self._lock:
            self._moves += 1

    def beat(self) -> None:
        """Publish a sign, unless the last one is still fresh."""
        with self._lock:
            now = time.monotonic()
            if now - self._last < self._period:
                return
            self._last = now
            self._beats += 1
            self._mailbox.write(self._key, json.dumps([self._beats, self._moves, self._at[0], self._level]))

    def stop(self) -> None:
        """Take the sign away."""
        with self._lock:
            self._last = -self._period
            self._mailbox.forget([self._key])


@dataclass
class _Record:
    beats: int
    moves: int
    phase: str
    level: int
    heard: float
    moved: float
    seen: bool


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

    def look(self, ranks: Iterable[int]) -> bool:
        """Look for new signs of *ranks*, unless the last look is recent; tell whether it looked."""
        now = time.monotonic()
        if now - self._looked < self._period:
            return False
        self._looked = now
        for rank in ranks:
            self._note(rank, self._mailbox.peek(sign_key(rank)), now)
        return True

    def _note(self, rank: int, sign: str | None, now: float) -> None:
        beats, moves, phase, level = (0, 0, "", -1) if sign is None else json.loads(sign)
        old = self._records.get(rank)
        heard = now if old is None or (sign is not None and beats != old.beats) else old.heard
        moved = now if old is None or (sign is not None and moves != old.moves) else old.moved
        if sign is None and old is not None:
            beats, moves, phase, level = old.beats, old.moves, old.phase, old.level
        self._records[rank] = _Record(beats, moves, phase, level, heard, moved, sign is not None or bool(old and old.seen))

    def silent(self, ranks: Iterable[int]) -> str:
        """Say which of *ranks* gave no sign of life for too long, and what they did last; "" if none."""
        now = time.monotonic()
        return "; ".join(filter(None, (self._silence(rank, now) for rank in ranks)))

    def _silence(self, rank: int, now: float) -> str:
        record = self._records.get(rank)
        if record is None:
            return ""
        if now - record.heard > self._timeout:
            if not record.seen:
                return f"rank {rank} never came to this call ({now - record.heard:.0f} s)"
            return f"rank {rank} is lost: no sign of life for {now - record.heard:.0f} s, last seen {record.phase!r}"
        if now - record.moved > STUCK_TIMEOUTS * self._timeout:
            return f"rank {rank} is alive but makes no progress: {now - record.moved:.0f} s in {record.phase!r}"
        return ""

    def misplaced(self, ranks: Iterable[int], level: int) -> list[int]:
        """Return those of *ranks* that live but have no voice at *level*."""
        return [rank for rank in ranks if rank in self._records and 0 <= self._records[rank].level < level]

    def phases(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return what each of *ranks* was last seen doing."""
        return {rank: self._records[rank].phase for rank in ranks if rank in self._records}
