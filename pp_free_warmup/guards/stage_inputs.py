"""The activation that a stage got from its neighbour, kept on the module by ``set_input_tensor``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import entries_kept

NAMES = (
    "input_tensor",  # transformer, hybrid and Mamba blocks; wrapped Hugging Face models
    "input_tensors",  # MIMO
    "encoder_hidden_state",  # T5, LLaVA
)


@contextmanager
def stage_inputs(call: ScheduleCall) -> Iterator[None]:
    """Drop the made-up activation once the pass is over, and its memory with it.

    Changed by: Megatron's forward step, which hands each chunk its input.
    Put back by: the object that was there before.
    Missed by: memory: one activation per chunk; a forward without a schedule, which would start from it.
    """
    with entries_kept(map(vars, call.modules()), NAMES):
        yield
