"""What follows from the ranks' records: first steps, their ratio, the law, and what differs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from pp_free_warmup._cli._cores import cores_usable
from pp_free_warmup._cli._plan import Plan
from pp_free_warmup._cli._records import RankRecord, StepTimes
from pp_free_warmup.testing._shared_gpu import mark

COLD_FACTOR, STEADY_FACTOR = 1.1, 1.2
DIFFERENCES_KEPT = 100


@dataclass(frozen=True)
class Run:
    """One training run, all its ranks."""

    ranks: tuple[RankRecord, ...]

    @property
    def zero(self) -> float:
        """When the first rank began its first step."""
        return min(rank.steps[0].began for rank in self.ranks)

    @property
    def first_step_s(self) -> float:
        """Seconds from there until the last rank had ended its first step, warmup included."""
        return max(rank.steps[0].ended for rank in self.ranks) - self.zero

    @property
    def steady_step_s(self) -> float:
        """The median of the slowest rank's seconds per step, from the third step on."""
        steps: Iterable[tuple[StepTimes, ...]] = zip(*(rank.steps[2:] for rank in self.ranks), strict=True)
        return median(max(step.seconds for step in ranks) for ranks in steps)

    @property
    def slowest_stage_cold_s(self) -> float:
        """The slowest stage's seconds inside its own first forward and backward of each chunk, without any waiting."""
        return max(sum(span.seconds for span in rank.spans if span.first) for rank in self.ranks)

    def warmup_s(self, phase: str | None = None) -> float:
        """Return the slowest rank's seconds in the whole warmup, or in one phase of it."""
        reports = [rank.warmup for rank in self.ranks if rank.warmup is not None]
        return max(
            float(report["total_s"] if phase is None else report["seconds"].get(phase, 0.0)) for report in reports
        )


@dataclass(frozen=True)
class Pair:
    """One run without the warmup and one with it."""

    cold: Run
    warm: Run

    @property
    def ratio(self) -> float:
        """How many times faster the first step was with the warmup."""
        return self.cold.first_step_s / self.warm.first_step_s

    def differences(self) -> Iterable[str]:
        """Name everything that is not equal to the bit, the earliest first."""
        for number, per_rank in enumerate(self._steps(), start=1):
            for rank, (cold, warm) in enumerate(per_rank):
                for name in dict.fromkeys((*cold, *warm)):
                    if cold.get(name) != warm.get(name):
                        yield f"step {number}, rank {rank}: {name}"

    def _steps(self) -> Iterable[tuple[tuple[dict[str, str], dict[str, str]], ...]]:
        """Return for each step, for each rank, what both runs made."""
        both = zip(self.cold.ranks, self.warm.ranks, strict=True)
        return zip(*(zip(cold.made, warm.made, strict=True) for cold, warm in both), strict=True)


class Result:
    """What the demo has found; every number is a median over the pairs.

    Args:
        plan: What was run.
        pairs: The runs, at least one pair.
    """

    def __init__(self, plan: Plan, pairs: list[Pair]) -> None:
        self.plan = plan
        self.pairs = pairs
        self.cold_s = median(pair.cold.first_step_s for pair in pairs)
        self.warm_s = median(pair.warm.first_step_s for pair in pairs)
        self.warmup_s = median(pair.warm.warmup_s() for pair in pairs)
        self.channels_s = median(pair.warm.warmup_s("channels") for pair in pairs)
        self.steady_s = median(run.steady_step_s for pair in pairs for run in (pair.cold, pair.warm))
        self.slowest_s = median(pair.cold.slowest_stage_cold_s for pair in pairs)
        self.differences = [name for pair in pairs for name in pair.differences()]
        self.compared = sum(len(made) for pair in pairs for rank in pair.cold.ranks for made in rank.made)

    @property
    def ratio(self) -> float:
        """First step without the warmup over first step with it."""
        return self.cold_s / self.warm_s

    @property
    def bound_s(self) -> float:
        """What the first step with the warmup may take: no more than its slowest stage, and one steady step."""
        return COLD_FACTOR * self.slowest_s + STEADY_FACTOR * self.steady_s

    @property
    def law_applies(self) -> bool:
        """False where compiling stages share cores: then each is slower than it was alone."""
        return self.plan.simulate_jit is not None or self.plan.pp <= cores_usable()

    @property
    def typical(self) -> Pair:
        """The pair whose ratio is the median (the lower one of two)."""
        return sorted(self.pairs, key=lambda pair: pair.ratio)[(len(self.pairs) - 1) // 2]

    def to_dict(self) -> dict[str, Any]:
        """Return the result ready for JSON."""
        return {
            **asdict(self.plan),
            **mark(self.plan.device, self.plan.pp),
            "cores_usable": cores_usable(),
            "repeat": len(self.pairs),
            "without": {"first_step_s": self.cold_s},
            "with": {"first_step_s": self.warm_s, "warmup_s": self.warmup_s, "channels_s": self.channels_s},
            "ratio": self.ratio,
            "steady_step_s": self.steady_s,
            "slowest_stage_cold_s": self.slowest_s,
            "law": {"bound_s": self.bound_s, "holds": self.warm_s <= self.bound_s, "applies": self.law_applies},
            "identical": not self.differences,
            "compared": self.compared,
            "differences": self.differences[:DIFFERENCES_KEPT],
            "first_steps_s": [[pair.cold.first_step_s, pair.warm.first_step_s] for pair in self.pairs],
        }
