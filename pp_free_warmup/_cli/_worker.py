"""What one rank of the demo does: train, and write down when and what.

Megatron is imported inside the functions: the process that sends this to the ranks
imports the module only to name it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pp_free_warmup._cli._plan import Plan
from pp_free_warmup._cli._records import RankRecord, StepTimes, clock

if TYPE_CHECKING:
    from pp_free_warmup.testing.models import Training


def train(plan: Plan, *, warmed: bool, notes: str) -> RankRecord:
    """Train the small GPT on this rank; `torch.distributed` must be running.

    One compile thread per rank: Inductor's default is a pool of many per process, with which a stage
    that compiles alone would take the cores of those that compile beside it in the other run.

    Args:
        plan: What to train.
        warmed: Whether to warm up.
        notes: A folder in which the rank keeps a file that says what it does now.
    """
    import torch._inductor.config as inductor
    import torch.distributed as dist

    from pp_free_warmup import pipeline_warmup
    from pp_free_warmup._cli._timeline import Timeline
    from pp_free_warmup.testing._recording import Activations
    from pp_free_warmup.testing.models import build

    inductor.compile_threads = 1
    note = Path(notes, f"rank {dist.get_rank()}")
    note.write_text("builds the model")
    training = build(plan.layout())
    note.write_text("waits")
    timeline, activations = Timeline(training.chunks, note.write_text), Activations("Layer")
    block: Any = (
        pipeline_warmup(training.chunks, training.optimizer, on_unsupported="raise") if warmed else nullcontext()
    )
    steps: list[StepTimes] = []
    made: list[dict[str, str]] = []
    with _first_uses(plan, training), timeline.watching(), activations.watched(training.chunks):
        dist.barrier()
        with block as warmup:
            for number in range(1, plan.steps + 1):
                steps.append(_step(training, made))
                made[-1] |= activations.taken()
                note.write_text(f"step {number + 1} of {plan.steps}")
    note.write_text("done")
    report = warmup.reports[0].to_dict() if warmed else None
    return RankRecord(dist.get_rank(), steps, timeline.until(steps[0].scheduled), report, made)


@contextmanager
def _first_uses(plan: Plan, training: Training) -> Iterator[None]:
    """Let the first uses of a chunk sleep, if that is planned, and then compile nothing."""
    import torch

    from pp_free_warmup._cli._simulated import first_uses_take

    with ExitStack() as simulated:
        if plan.simulate_jit is not None:
            simulated.enter_context(torch.compiler.set_stance("force_eager"))
            simulated.enter_context(first_uses_take(plan.simulate_jit, training.chunks))
        yield


def _step(training: Training, made: list[dict[str, str]]) -> StepTimes:
    """Take one training step as a trainer does, and hash what it makes outside of what is timed."""
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from pp_free_warmup.testing import _recording as recording

    began = clock()
    training.zero_grad()
    losses = get_forward_backward_func()(**training.schedule_arguments())
    scheduled = clock()
    dist.barrier()  # the optimizer's gradient norm waits for every stage anyway; here the wait shows as one
    met = clock()
    fields = recording.loss_fields(losses) | recording.gradient_fields(training.chunks)
    hashed = clock()
    _, norm, _ = training.optimizer.step()
    ended = met + clock() - hashed
    made.append(fields | {"gradient norm": float(norm).hex()} | recording.model_fields(training.chunks))
    return StepTimes(began, scheduled, met, ended)
