"""The file of routing decisions that a traced run writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import swapped


@contextmanager
def router_trace(_call: ScheduleCall) -> Iterator[None]:
    """Keep the warmup's routing out of the trace.

    Changed by: hooks on every router. They hold the tracer itself, so taking the global one away
        would not stop them.
    Put back by: lending the tracer the flag by which it stops after its last step.
    Missed by: the trace file: one step too many on every rank, and one too few at its end.
    """
    tracer = megatron.router_tracer()
    if tracer is None:
        yield
        return
    with swapped(tracer, "_stopped", True):
        yield
