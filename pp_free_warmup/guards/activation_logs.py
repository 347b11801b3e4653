"""Activations, their gradients and tokens per expert, as Megatron's training loop saves them for some steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import emptied


@contextmanager
def activation_logs(_call: ScheduleCall) -> Iterator[None]:
    """Keep the warmup's tensors out of what is saved.

    Changed by: hooks that the training loop puts on for the steps to be saved.
    Put back by: emptying the dicts they fill, which they hold themselves, then the old contents.
    Missed by: the saved file: a microbatch too many per expert, made-up inputs on a middle stage.
    """
    with ExitStack() as kept:
        for record in list(megatron.activation_records()):
            kept.enter_context(emptied(record))
        yield
