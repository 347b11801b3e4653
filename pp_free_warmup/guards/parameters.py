"""Attributes that layers, optimizers and wrappers keep on parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import mapping_kept


@contextmanager
def parameters(call: ScheduleCall) -> Iterator[None]:
    """Keep every attribute of every parameter; its values are only read by a forward and backward.

    Changed by: a fused weight gradient, which sets ``grad_added_to_main_grad``; caches of transposed weights.
    Put back by: the very objects that were there; attributes that appeared are deleted.
    Missed by: the first step's gradients: an unfused one is skipped where the flag still says "added".
    """
    with ExitStack() as kept:
        for parameter in call.parameters():
            kept.enter_context(mapping_kept(vars(parameter)))
        yield
