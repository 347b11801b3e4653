"""What one rank says, what several say together, and what follows from it: no communication here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from pp_free_warmup._agreement.calls import Call, Callers, differences, together

REASONS_PER_TALLY = 8
REASON_LENGTH = 1000


class Word(str, Enum):
    """What a rank can say about a call, and what all its ranks then do.

    As a decision: ``GO`` runs the local pass everywhere, ``WARM`` opens the channels only, ``AGAIN``
    runs the pass once more; ``IDLE`` (some rank has no microbatches), ``OFF``, ``SKIP``, ``REFUSE`` and
    ``APART`` (the ranks are in different calls; no rank says that of itself) run the real schedule at
    once. After a failure, ``COLD`` says that its rank has put its state back: the real schedule can run.
    ``STOP`` says that it has, but cannot go on; it ends in an error on every rank, once all have spoken.
    ``FAILED`` does so at once.
    """

    GO = "go"
    WARM = "warm"
    IDLE = "idle"
    AGAIN = "again"
    COLD = "cold"
    STOP = "stop"
    OFF = "off"
    SKIP = "skip"
    REFUSE = "refuse"
    APART = "apart"
    FAILED = "failed"


FAILURES = (Word.FAILED, Word.STOP, Word.COLD)
GRAVEST_FIRST = (
    *(*FAILURES, Word.APART, Word.REFUSE, Word.SKIP, Word.OFF),
    *(Word.IDLE, Word.AGAIN, Word.GO, Word.WARM),
)


class Reason(NamedTuple):
    """Why one rank said what it said.

    Attributes:
        rank: The global rank.
        word: What it said.
        reason: Why, in its own words.
    """

    rank: int
    word: Word
    reason: str


class Spread(NamedTuple):
    """One number, such as a phase's seconds, over several ranks.

    Attributes:
        least: The smallest.
        most: The largest.
        least_rank: The global rank that has the smallest.
        most_rank: The global rank that has the largest.
    """

    least: float
    most: float
    least_rank: int
    most_rank: int


@dataclass(frozen=True)
class Tally:
    """What one rank says, or several together; its size does not grow with their number.

    Attributes:
        speaker: The global rank that says it for them.
        words: How many ranks said which word.
        reasons: The gravest reasons, at most `REASONS_PER_TALLY`.
        detail: Every number that the ranks gave, as its spread.
        calls: Which calls they are in: one, unless ranks of different calls meet.
    """

    speaker: int
    words: Mapping[Word, int]
    reasons: tuple[Reason, ...] = ()
    detail: Mapping[str, Spread] = field(default_factory=dict)
    calls: tuple[Callers, ...] = ()

    @classmethod
    def of(
        cls,
        rank: int,
        word: Word,
        reason: str = "",
        detail: Mapping[str, float] | None = None,
        call: Call | None = None,
    ) -> Tally:
        """Say what one rank says."""
        named = bool(reason) or word not in (Word.GO, Word.WARM)
        reasons = (Reason(rank, word, reason[:REASON_LENGTH]),) if named else ()
        spreads = {name: Spread(number, number, rank, rank) for name, number in (detail or {}).items()}
        calls = () if call is None else (Callers(call, 1, (rank,)),)
        return cls(rank, {word: 1}, reasons, spreads, calls)

    @classmethod
    def together(cls, speaker: int, tallies: Sequence[Tally]) -> Tally:
        """Put together what several tallies say."""
        words = Counter[Word]()
        spreads: dict[str, list[Spread]] = {}
        for tally in tallies:
            words.update(tally.words)
            for name, spread in tally.detail.items():
                spreads.setdefault(name, []).append(spread)
        reasons = gravest(reason for tally in tallies for reason in tally.reasons)
        detail = {name: _wider(found) for name, found in spreads.items()}
        calls = together(callers for tally in tallies for callers in tally.calls)
        return cls(speaker, dict(words), reasons[:REASONS_PER_TALLY], detail, calls)

    @property
    def ranks(self) -> int:
        """How many ranks are counted."""
        return sum(self.words.values())

    def line(self) -> str:
        """Write this as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Tally:
        """Read what `line` wrote, already parsed."""
        return cls(
            said["speaker"],
            {Word(word): count for word, count in said["words"].items()},
            _read_reasons(said["reasons"]),
            {name: Spread(*spread) for name, spread in said["detail"].items()},
            tuple(map(Callers.read, said["calls"])),
        )


@dataclass(frozen=True)
class Decision:
    """What all ranks of a call do, decided once for all of them.

    Attributes:
        word: What to do.
        reasons: Why, gravest first, with the global ranks.
        stages: What each stage said, in pipeline order; empty where one rank alone decided for all
            (it failed, or found another one silent).
        silent: Which ranks gave no sign of life and what they were last seen doing; "" if all spoke.
        apart: Which ranks are in which call, where they meet in different ones; else "".
    """

    word: Word
    reasons: tuple[Reason, ...] = ()
    stages: tuple[Tally, ...] = ()
    silent: str = ""
    apart: str = ""

    @property
    def is_off_everywhere(self) -> bool:
        """True where every rank said `Word.OFF` or `Word.IDLE`, and so none has touched anything."""
        return bool(self.stages) and {word for stage in self.stages for word in stage.words} <= {Word.OFF, Word.IDLE}

    @property
    def kinds(self) -> frozenset[str]:
        """Every kind of call that a rank is in."""
        return frozenset(callers.call.kind for stage in self.stages for callers in stage.calls)

    def text(self) -> str:
        """Write this as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Decision:
        """Read what `text` wrote."""
        said = json.loads(text)
        stages = tuple(Tally.read(stage) for stage in said["stages"])
        return cls(Word(said["word"]), _read_reasons(said["reasons"]), stages, said["silent"], said["apart"])


def decide(stages: Sequence[Tally]) -> Decision:
    """Decide for all ranks from what the stages say.

    One failure fails the call on all ranks (the gravest of `FAILURES` says how), one refusal refuses
    it, one skip skips it. Where the ranks are in different calls (a replica evaluates while another
    trains), nobody warms up, unless all are warm: channels are the same for every call. Where some
    ranks have the warmup switched off and others not, nobody warms up, and the reasons name those that
    have it off; where some have no microbatches, nobody warms up this time. Where all are warm, only
    the channels are opened; where some are, all run the pass.

    Args:
        stages: What each stage says, in pipeline order.

    Returns:
        The decision: the same from the same words, whoever computes it.

    Example:
        >>> decide([Tally.of(0, Word.GO), Tally.of(1, Word.WARM)]).word.value
        'go'
    """
    words = Counter[Word]()
    for stage in stages:
        words.update(stage.words)
    reasons = gravest(reason for stage in stages for reason in stage.reasons)
    apart = "" if set(words) == {Word.WARM} else differences([stage.calls for stage in stages])
    word = _gravest_word({*words, Word.APART} if apart else {*words})
    return Decision(word, reasons, tuple(stages), apart=apart)


def _gravest_word(said: AbstractSet[Word]) -> Word:
    gravest_word = min(said, key=GRAVEST_FIRST.index)
    return Word.SKIP if gravest_word is Word.OFF and len(said) > 1 else gravest_word


def gravest(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """Sort reasons by how grave they are, then by rank."""
    return tuple(sorted(reasons, key=lambda reason: (GRAVEST_FIRST.index(reason.word), reason.rank)))


def _wider(spreads: Sequence[Spread]) -> Spread:
    least, least_rank = min((spread.least, spread.least_rank) for spread in spreads)
    most, most_rank = max((spread.most, -spread.most_rank) for spread in spreads)
    return Spread(least, most, least_rank, -most_rank)


def _read_reasons(said: Iterable[Sequence[Any]]) -> tuple[Reason, ...]:
    return tuple(Reason(rank, Word(word), reason) for rank, word, reason in said)
