"""Attributes that layers, optimizers and wrappers keep on parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup._call import ScheduleCall

# What torch.compile notes of the code it compiled in the pass, which stays: without the note it would be stale.
COMPILER = "_dynamo_"


@contextmanager
def parameters(call: ScheduleCall) -> Iterator[None]:
    """Keep every attribute of every parameter; its values are only read by a forward and backward.

    Changed by: a fused weight gradient, which sets ``grad_added_to_main_grad``; caches of transposed weights.
    Put back by: the very objects that were there; attributes that appeared are deleted, the compiler's excepted.
    Missed by: the first step's gradients: an unfused one is skipped where the flag still says "added".
    """
    before = [(vars(parameter), dict(vars(parameter))) for parameter in call.parameters()]
    try:
        yield
    finally:
        for attributes, kept in before:
            noted = {name: value for name, value in attributes.items() if name.startswith(COMPILER)}
            attributes.clear()
            attributes.update(kept | noted)
