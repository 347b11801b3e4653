"""Records of runs that never ran, with round numbers, for the tests of what is made of records."""

from __future__ import annotations

from pp_free_warmup._cli._records import RankRecord, Span, StepTimes
from pp_free_warmup._cli._results import Pair, Run

STEADY_S = 0.1
CHANNELS_S = 0.5


def cold_rank(rank: int, pp: int, cost: float, made: list[dict[str, str]]) -> RankRecord:
    """One stage of a staircase: everybody's first forward takes *cost*, and so does the first backward."""
    forward = Span("forward", 0, cost * rank, cost * (rank + 1), first=True, warmup=False)
    up = cost * (2 * pp - 1 - rank)
    backward = Span("backward", 0, up, up + cost, first=True, warmup=False)
    end = 2 * cost * pp
    steps = [StepTimes(0.0, backward.ended, end, end + STEADY_S), *_steady(len(made) - 1)]
    return RankRecord(rank, steps, [forward, backward], None, made)


def warm_rank(rank: int, cost: float, made: list[dict[str, str]]) -> RankRecord:
    """One stage that pays its cost beside all others, opens the channels and then takes a steady step."""
    ready = 2 * cost + CHANNELS_S
    spans = [
        Span("forward", 0, 0.0, cost, first=True, warmup=True),
        Span("backward", 0, cost, 2 * cost, first=True, warmup=True),
        Span("forward", 0, ready, ready + STEADY_S / 2, first=False, warmup=False),
        Span("backward", 0, ready + STEADY_S / 2, ready + STEADY_S, first=False, warmup=False),
    ]
    end = ready + STEADY_S
    report = {"outcome": "warmed", "reason": "", "total_s": ready, "seconds": {"channels": CHANNELS_S}}
    return RankRecord(rank, [StepTimes(0.0, end, end, end), *_steady(len(made) - 1)], spans, report, made)


def pair(pp: int = 2, cost: float = 2.0, steps: int = 4) -> Pair:
    """Make two runs that are equal to the bit."""
    made = [{"loss[0].lm loss": f"{step}", "gradient norm": "0x1p+0"} for step in range(steps)]
    cold = [cold_rank(rank, pp, cost, [dict(step) for step in made]) for rank in range(pp)]
    warm = [warm_rank(rank, cost, [dict(step) for step in made]) for rank in range(pp)]
    return Pair(Run(tuple(cold)), Run(tuple(warm)))


def _steady(steps: int) -> list[StepTimes]:
    return [StepTimes(0.0, STEADY_S, STEADY_S, STEADY_S)] * steps
