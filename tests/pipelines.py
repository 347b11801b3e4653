"""A tiny real pipeline whose forward steps are counted, those of a warmup apart from the real ones."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from pp_free_warmup import in_warmup
from pp_free_warmup.testing import models
from pp_free_warmup.testing.models import Layout

SMALL = Layout(layers=2, hidden=16, heads=2, seq=8, vocab=32, micro_batch=1, num_microbatches=2)
VIRTUAL = replace(SMALL, vp=2, layers=4)


_NOTES: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


class Witness:
    """A list that no warmup puts back, since none can reach it: for tests that ask what a pass did."""

    def append(self, note: Any) -> None:
        """Add a note."""
        _NOTES.setdefault(self, []).append(note)

    @property
    def notes(self) -> list[Any]:
        """All notes, oldest first."""
        return _NOTES.setdefault(self, [])

    def __len__(self) -> int:
        return len(self.notes)


class Counting:
    """A ``forward_step_func`` that counts its calls; *also* is called in each, first.

    Attributes:
        order: ``"pass"`` or ``"real"`` for each call.
    """

    def __init__(self, also: Any = None) -> None:
        self.also = also
        self._calls = Witness()

    def __call__(self, iterator: Any, chunk: Any) -> Any:
        """Count, then run the microbatch."""
        self._calls.append("pass" if in_warmup() else "real")
        if self.also is not None:
            self.also()
        return models.forward_step(iterator, chunk)

    @property
    def order(self) -> list[str]:
        """What each call was, oldest first."""
        return self._calls.notes

    @property
    def passes(self) -> int:
        """Count the calls inside a warmup."""
        return self.order.count("pass")

    @property
    def real(self) -> int:
        """Count the calls of the real schedule."""
        return self.order.count("real")

    @property
    def counts(self) -> tuple[int, int]:
        """Passes and real calls."""
        return self.passes, self.real


def pipeline(layout: Layout = SMALL, seed: int = 1, also: Any = None) -> Any:
    """Build a small model in training whose ``forward_step`` is a `Counting`."""
    return models.build(layout, seed, step=Counting(also))


def fetched() -> Any:
    """Fetch the schedule now, as a trainer does."""
    return get_forward_backward_func()


def call(training: Any, schedule: Any = None, **keywords: Any) -> Any:
    """Call the schedule, fetched now unless given, for one step of *training*."""
    forward_only = keywords.pop("forward_only", False)
    arguments = {**training.schedule_arguments(forward_only=forward_only), **keywords}
    return (schedule or fetched())(**arguments)


def everyone(value: Any) -> list[Any]:
    """Return every rank's value, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the lines that the library logs on this rank for the user to see."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pp_free_warmup")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def losses_of_step(training: Any) -> tuple[float, ...]:
    """Take one whole step, and return the losses of its microbatches: none but on the last stage."""
    return tuple(float(loss["lm loss"][0]) for loss in training.step().losses)


def start_anew(layout: Layout, seed: int = 1) -> None:
    """Start Megatron's groups and random numbers again, as a new process would."""
    parallel_state.destroy_model_parallel()
    models.parallel(layout.pp, layout.vp, seed=seed)
