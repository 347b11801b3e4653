"""Random numbers: Python, NumPy, torch, every CUDA device, Megatron's tracker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup._call import ScheduleCall


@contextmanager
def rng(call: ScheduleCall) -> Iterator[None]:
    """Let the real step draw what it would have drawn without a warmup.

    Changed by: dropout, stochastic rounding, random routing, and whatever draws in the forward step.
    Put back by: saving the contents of every generator and setting them on the same objects.
    Missed by: the loss, from the first step on.
    """
    call.random.read()
    try:
        yield
    finally:
        call.random.set()
