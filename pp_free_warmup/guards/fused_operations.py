"""Fused forms of layers, which Transformer Engine's op fuser builds at the first forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import attributes_kept


@contextmanager
def fused_operations(call: ScheduleCall) -> Iterator[None]:
    """Let the real forward build the fused form of a layer.

    Changed by: the first forward of a layer under ``use_transformer_engine_op_fuser``. It copies the
        hooks that are on the layer at that moment, for good.
    Put back by: the old tuple, or None.
    Missed by: hooks that the trainer puts on or takes off between the pass and the first real forward.
    """
    with ExitStack() as kept:
        for module, name in list(megatron.fused_operations(call.modules())):
            kept.enter_context(attributes_kept(module, (name,)))
        yield
