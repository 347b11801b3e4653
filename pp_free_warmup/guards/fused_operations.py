"""Fused forms of layers, which Transformer Engine's op fuser builds at the first forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import contents_kept, entries_kept


@contextmanager
def fused_operations(call: ScheduleCall) -> Iterator[None]:
    """Let the real forward build the fused form of a layer.

    Changed by: the first forward of a layer under ``use_transformer_engine_op_fuser``. It copies the
        hooks that are on the layer at that moment, for good.
    Put back by: the old tuple, or None; and so with the recipe and the scales that were made for it.
    Missed by: hooks that the trainer puts on or takes off between the pass and the first real forward.
    """
    fields = [vars(module) for module in megatron.fusing(call.modules())]
    sizes = [each.get(megatron.SIZES_FOR_FUSED) for each in fields]
    with entries_kept(fields, (*megatron.FUSED, *megatron.MADE_FOR_FUSED)), contents_kept(*sizes):
        yield
