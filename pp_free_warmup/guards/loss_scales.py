"""What auxiliary losses are scaled with in the backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import lent


@contextmanager
def loss_scales(call: ScheduleCall) -> Iterator[None]:
    """Keep the scale tensors of the MoE, MTP and DSA losses, their values, and None where there was none.

    Changed by: `forward_step`, which sets them from the loss scale; MoE and DSA copy in place.
    Put back by: lending a copy for the pass, then the old object.
    Missed by: a graph or a caller that holds the tensor; a backward without a forward_step before it.
    """
    with lent(megatron.loss_scales(call.configs())):
        yield
