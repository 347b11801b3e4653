"""The microbatch number that the schedule writes on layers, for CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import entries_kept


@contextmanager
def current_microbatch(call: ScheduleCall) -> Iterator[None]:
    """Keep the number by which a layer picks its graph.

    Changed by: `set_current_microbatch`, called by Megatron's forward step (`schedules.py`, or `cuda_graphs.py`).
    Put back by: the attribute as it was on each layer, or absent.
    Missed by: the field itself; a later forward without a schedule, which would replay graph 0.
    """
    with entries_kept(map(vars, call.modules()), ("current_microbatch",)):
        yield
