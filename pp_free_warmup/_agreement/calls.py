"""Which calls meet in one vote, and whether they are one and the same: no communication here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

RANKS_NAMED = 8


class Call(NamedTuple):
    """What every rank of a stage must agree on before their votes can mean the same.

    Attributes:
        kind: Training or forward-only.
        chunks: How many model chunks the rank has.
        model: The class of the first chunk, unwrapped; stages of one pipeline may differ in it.
    """

    kind: str
    chunks: int
    model: str

    def __str__(self) -> str:
        return f"{self.kind} call of {self.chunks} chunk{'s' if self.chunks > 1 else ''} of {self.model}"


class Callers(NamedTuple):
    """Who makes one call; as long for a thousand ranks as for eight.

    Attributes:
        call: What they make.
        total: How many ranks make it.
        ranks: The lowest of their global ranks, at most `RANKS_NAMED`.
    """

    call: Call
    total: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        more = f" and {self.total - len(self.ranks)} more" if self.total > len(self.ranks) else ""
        ranks = ", ".join(map(str, self.ranks))
        return f"a {self.call} on rank{'s' if self.total > 1 else ''} {ranks}{more}"

    @classmethod
    def read(cls, said: Sequence[Any]) -> Callers:
        """Read what JSON made of it."""
        call, total, ranks = said
        return cls(Call(*call), total, tuple(ranks))


def together(callers: Iterable[Callers]) -> tuple[Callers, ...]:
    """Put those who make the same call together, sorted by the call."""
    found: dict[Call, Callers] = {}
    for one in callers:
        known = found.get(one.call, Callers(one.call, 0, ()))
        ranks = tuple(sorted(known.ranks + one.ranks)[:RANKS_NAMED])
        found[one.call] = Callers(one.call, known.total + one.total, ranks)
    return tuple(found[call] for call in sorted(found))


def differences(stages: Sequence[Sequence[Callers]]) -> str:
    """Say who makes which call, if they are not one and the same; else return "".

    Kind and number of chunks must be alike everywhere, the model's class within each stage.

    Args:
        stages: Who makes which call, per stage.

    Example:
        >>> train, score = Call("training", 1, "GPTModel"), Call("forward-only", 1, "GPTModel")
        >>> differences([[Callers(train, 1, (0,))], [Callers(score, 1, (1,))]])
        'a forward-only call of 1 chunk of GPTModel on rank 1; a training call of 1 chunk of GPTModel on rank 0'
    """
    everyone = together(one for stage in stages for one in stage)
    alike = len({one.call[:2] for one in everyone}) < 2
    if alike and all(len({one.call for one in stage}) < 2 for stage in stages):
        return ""
    return "; ".join(map(str, everyone))
