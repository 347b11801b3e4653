"""Compare a training run with the warmup to one without, bit by bit.

Example:
    On every rank (see `ranks`)::

        cold = record(layout, steps=20)
        warm = record(layout, steps=20, around=lambda training: pipeline_warmup(training.chunks))
        assert differences(cold, warm) == []
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from pp_free_warmup._state_walk import Fields
from pp_free_warmup._trace import BENIGN, changes
from pp_free_warmup.testing import _recording as recording
from pp_free_warmup.testing._afresh import forget_megatron
from pp_free_warmup.testing.models import Layout, Schedule, Training, build

__all__ = [
    "accumulated_gradients",
    "differences",
    "forward_only_first",
    "plain_step",
    "record",
]

Script = Callable[[Training, Schedule, int], list[Any]]
Around = Callable[[Training], AbstractContextManager[Any]]


def plain_step(training: Training, schedule: Schedule, number: int) -> list[Any]:
    """Zero the gradients and call the schedule, as every step of a plain trainer does."""
    del number
    training.zero_grad()
    return list(schedule(**training.schedule_arguments()))


def forward_only_first(training: Training, schedule: Schedule, number: int) -> list[Any]:
    """Ask for outputs without a backward before each step, as reinforcement learning does for log-probs."""
    with torch.no_grad():
        seen = schedule(**training.schedule_arguments(forward_only=True))
    return [*seen, *plain_step(training, schedule, number)]


def accumulated_gradients(training: Training, schedule: Schedule, number: int) -> list[Any]:
    """Have gradients in the buffers when the schedule is called, and do not zero them."""
    training.zero_grad()
    generator = torch.Generator().manual_seed(5 + number)
    for chunk in training.chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.copy_(1e-3 * torch.randn(parameter.shape, generator=generator))
    return list(schedule(**training.schedule_arguments()))


def record(
    layout: Layout,
    steps: int = 20,
    *,
    around: Around | None = None,
    at: int = 0,
    seed: int = 1,
    script: Script = plain_step,
    make: Callable[[Layout, int], Training] = build,
) -> list[Fields]:
    """Train from the beginning and write down every step on this rank.

    Megatron's groups of an earlier run are taken down first, so several runs can follow one
    another in one process. ``torch.distributed`` must be running.

    Args:
        layout: What to train.
        steps: How many steps.
        around: Gives the context manager around one step; the schedule is fetched inside.
        at: Which step that is, from 0.
        seed: Seeds weights, dropout and data.
        script: What a step does before the optimizer.
        make: Builds the training, for data or a forward step of one's own.

    Returns:
        One mapping per step, from a path to exact text: losses, norm, gradients before the optimizer,
        parameters and buffers after it, activations, random states, loss trackers; for the first,
        the last and step *at* also everything that `assert_leaves_no_trace` compares.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    forget_megatron()
    dist.barrier()
    training, activations, recorded = make(layout, seed), recording.Activations(), []
    with activations.watched(training.chunks):
        for number in range(steps):
            with around(training) if around is not None and number == at else nullcontext():
                losses = script(training, get_forward_backward_func(), number)
            recorded.append(_finished_step(training, activations, losses, whole=number in (0, at, steps - 1)))
    return recorded


def _finished_step(training: Training, activations: recording.Activations, losses: Any, *, whole: bool) -> Fields:
    """Write down what the schedule left, take the optimizer's step, and write down what that left."""
    fields = recording.loss_fields(losses) | recording.gradient_fields(training.chunks)
    _, norm, _ = training.optimizer.step()
    fields |= {"grad_norm": "none" if norm is None else float(norm).hex(), **activations.taken()}
    fields |= recording.model_fields(training.chunks) | recording.global_fields()
    if whole:
        fields |= recording.whole_fields(training.chunks, training.optimizer)
    return fields


def differences(run: list[Fields], other: list[Fields], limit: int = 40) -> list[str]:
    """Compare two records step by step, as far as the shorter one goes.

    Args:
        run: What `record` returned.
        other: What it returned for the other run.
        limit: How many lines to return at most, the earliest steps first.

    Returns:
        One line per step and path that differs; none if the runs agree to the bit.
    """
    last = min(len(run), len(other)) - 1
    lines: list[str] = []
    for number in range(last + 1):
        fields, others = run[number], other[number]
        # A run's last step has its whole state; the longer run has less of that step.
        common = fields.keys() & others.keys() if number == last and len(run) != len(other) else None
        found = changes(_only(fields, common), _only(others, common), (f"state.{each}" for each in BENIGN))
        lines += [f"step {number}: {line.strip()}" for line in found]
    return lines[:limit]


def _only(fields: Fields, paths: AbstractSet[str] | None) -> Fields:
    return fields if paths is None else {path: fields[path] for path in paths}
