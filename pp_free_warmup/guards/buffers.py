"""Registered buffers of every module: MoE token counts and biases, running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import contents_kept, tensors_kept


@contextmanager
def buffers(call: ScheduleCall) -> Iterator[None]:
    """Keep the values of all buffers, non-persistent ones too, and which ones there are.

    They are read from each module's registry: Megatron's DDP shadows `Module.buffers`.

    Changed by: forwards that count tokens or keep statistics; routers that re-assign a bias as float32.
    Put back by: copying the values back into the same storage; buffers that appeared are removed.
    Missed by: the expert bias, which the counted tokens move at the end of the step.
    """
    registries = [vars(module)["_buffers"] for module in call.modules()]
    unsaved = [vars(module)["_non_persistent_buffers_set"] for module in call.modules()]
    tensors = {id(b): b for registry in registries for b in registry.values() if b is not None}
    with tensors_kept(tensors.values()), contents_kept(*registries, *unsaved):
        yield
