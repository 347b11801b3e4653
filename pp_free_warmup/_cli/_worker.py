"""What one rank of the demo does: train, and write down when and what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pp_free_warmup import pipeline_warmup
from pp_free_warmup._cli._fingerprints import Fingerprints
from pp_free_warmup._cli._plan import Plan
from pp_free_warmup._cli._simulated import first_uses_take
from pp_free_warmup._cli._timeline import Span, Timeline, clock
from pp_free_warmup.testing.models import Training, build


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
        fingerprints: Hashes of all that training made, by name.
    """

    rank: int
    steps: list[StepTimes]
    spans: list[Span]
    warmup: dict[str, Any] | None
    fingerprints: dict[str, str]


def train(plan: Plan, *, warmed: bool, notes: str) -> RankRecord:
    """Train the small GPT on this rank; `torch.distributed` must be running.

    Args:
        plan: What to train.
        warmed: Whether to warm up.
        notes: A folder in which the rank keeps a file that says what it does now.
    """
    note = Path(notes, f"rank {dist.get_rank()}")
    note.write_text("builds the model")
    training = build(plan.layout())
    timeline = Timeline(training.chunks, note.write_text)
    fingerprints = Fingerprints(training.chunks)
    with ExitStack() as watched:
        if plan.simulate_jit is not None:
            watched.enter_context(torch.compiler.set_stance("force_eager"))
            watched.enter_context(first_uses_take(plan.simulate_jit, training.chunks))
        watched.enter_context(timeline.watching())
        watched.enter_context(fingerprints.watching_activations())
        dist.barrier()
        with _warmup(training, warmed) as report:
            steps = [_step(training, fingerprints, 1)]
            spans = list(timeline.spans)
            for number in range(2, plan.steps + 1):
                note.write_text(f"step {number} of {plan.steps}")
                steps.append(_step(training, fingerprints, number))
    note.write_text("done")
    return RankRecord(dist.get_rank(), steps, spans, report(), fingerprints.taken)


@contextmanager
def _warmup(training: Training, warmed: bool) -> Iterator[Any]:
    """Open the block that a user opens; yield what returns the first report as a dict."""
    if not warmed:
        yield lambda: None
        return
    with pipeline_warmup(training.chunks, training.optimizer, on_unsupported="raise") as warmup:
        yield lambda: warmup.reports[0].to_dict()


def _step(training: Training, fingerprints: Fingerprints, number: int) -> StepTimes:
    """Take one training step as a trainer does, and hash what it makes outside of what is timed."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    fingerprints.begin(number)
    began = clock()
    training.zero_grad()
    losses = get_forward_backward_func()(**training.schedule_arguments())
    scheduled = clock()
    dist.barrier()  # the optimizer's gradient norm waits for every stage anyway; so the wait shows as one
    met = clock()
    fingerprints.take_losses(losses)
    fingerprints.take_gradients()
    hashed = clock()
    _, norm, _ = training.optimizer.step()
    ended = met + clock() - hashed
    fingerprints.take("gradient norm", float(norm))
    fingerprints.take_parameters()
    return StepTimes(began, scheduled, met, ended)
