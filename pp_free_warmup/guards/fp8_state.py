"""Scales, amax histories and the global FP8 state of Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import _transformer_engine as te
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import attributes_kept, contents_kept, fields_kept, tensors_kept


@contextmanager
def fp8_state(call: ScheduleCall) -> Iterator[None]:
    """Keep every scale as it was, and take back what the first forward of a layer creates.

    Changed by: the first forward, which creates a layer's scales, registers them and caches quantized
        weights; every forward and backward, which write amax values; leaving the autocast
        region, which rolls the histories of all registered layers, another model's too.
    Put back by: copying scales and histories in place; keeping fields and the contents of their
        dicts and lists, so that a layer registered by the pass is registered anew.
    Missed by: losses, parameters and amax histories of an FP8 run.
    """
    layers = te.fp8_layers(megatron.with_fused_parts(call.modules()))
    with ExitStack() as kept:
        kept.enter_context(tensors_kept(te.fp8_values(layers)))
        for manager, names in te.fp8_manager_fields():
            kept.enter_context(attributes_kept(manager, names))
            kept.enter_context(contents_kept(*(vars(manager)[name] for name in names)))
        for owner in list(te.fp8_objects(layers)):
            kept.enter_context(fields_kept(owner, apart_from=te.FIELDS_OF_EVERY_MODULE))
        yield
