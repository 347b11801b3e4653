"""Loss values that MoE, MTP and DSA layers gather for the log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import lent


@contextmanager
def loss_trackers(_call: ScheduleCall) -> Iterator[None]:
    """Keep the log free of the warmup's losses.

    Changed by: the forward of those layers, once per microbatch.
    Put back by: lending an empty tracker for the pass, then the old object.
    Missed by: the first auxiliary loss in the log, and an entry where a cold run has none.
    """
    with lent(megatron.loss_trackers()):
        yield
