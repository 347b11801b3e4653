"""What a rank writes down while it trains; light, so that the process that only reads it need not import Megatron."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

# One clock for all processes of a host: CLOCK_MONOTONIC.
clock = time.monotonic


@dataclass(frozen=True)
class Span:
    """One forward or backward of one model chunk.

    Attributes:
        use: ``"forward"`` or ``"backward"``.
        chunk: Index of the model chunk on its rank.
        began: By `clock`.
        ended: By `clock`, work on the device included.
        first: True for the first one of this use and chunk in the process: the one that compiles.
        warmup: True inside the warmup's local pass.
    """

    use: str
    chunk: int
    began: float
    ended: float
    first: bool
    warmup: bool

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


@dataclass(frozen=True)
class StepTimes:
    """When one training step of one rank ran, by `clock`.

    Attributes:
        began: Before the schedule was called.
        scheduled: When the schedule had returned.
        met: When every stage was that far; a rank waits for it.
        ended: After the optimizer, the time for hashing left out.
    """

    began: float
    scheduled: float
    met: float
    ended: float

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return self.ended - self.began


@dataclass(frozen=True)
class RankRecord:
    """What one rank brings home.

    Attributes:
        rank: Its rank, which is its stage.
        steps: When each step ran.
        spans: The forwards and backwards of the first step, the warmup's included.
        warmup: The warmup's report as a dict; None in a run without.
        made: For each step, hashes of all that training made, by name.
    """

    rank: int
    steps: list[StepTimes]
    spans: list[Span]
    warmup: dict[str, Any] | None
    made: list[dict[str, str]]
