"""Flags that tell that a rank was sent more tokens than its capacity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import tensors_kept


@contextmanager
def router_budget(call: ScheduleCall) -> Iterator[None]:
    """Keep the flags down if the warmup alone went over budget.

    Changed by: a HybridEP dispatch, which only ever raises its flag.
    Put back by: copying the flags.
    Missed by: the first step of paged stashing, which would run a second time without it.
    """
    with tensors_kept(list(megatron.over_budget_flags(call.modules()))):
        yield
