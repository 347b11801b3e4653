"""Scales, amax histories and the global FP8 state of Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pp_free_warmup import _transformer_engine as te
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._structure import structure_kept
from pp_free_warmup._undo import attributes_kept, tensors_kept


@contextmanager
def fp8_state(call: ScheduleCall) -> Iterator[None]:
    """Keep every scale as it was, and the list of layers that have some.

    What the first forward creates on a layer goes by the guard ``fields``.

    Changed by: the first forward, which creates a layer's scales, registers them and caches quantized
        weights; every forward and backward, which write amax values; leaving the autocast
        region, which rolls the histories of all registered layers, another model's too.
    Put back by: copying scales and histories in place; keeping the contents of the manager's dicts and
        lists, so that a layer registered by the pass is registered anew.
    Missed by: losses, parameters and amax histories of an FP8 run.
    """
    layers = te.fp8_layers(call.reached())
    with ExitStack() as kept:
        kept.enter_context(tensors_kept(te.fp8_values(layers)))
        for manager, names in te.fp8_manager_fields():
            kept.enter_context(attributes_kept(manager, names))
            kept.enter_context(structure_kept(*(vars(manager)[name] for name in names)))
        yield
