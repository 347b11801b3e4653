"""Megatron's timers, those of the config and those of the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._structure import structure_kept
from pp_free_warmup._undo import swapped


@contextmanager
def timers(call: ScheduleCall) -> Iterator[None]:
    """Keep the pass out of the step's times, and no timer running after an error.

    Changed by: the step functions, through ``config.timers``; the forward step of the training loop.
    Put back by: ``config.timers = None`` for the pass; every timer's fields as they were.
    Missed by: logged times; after a failed pass, the assertion "timer has already been started".
    """
    configs = list(call.configs())
    with ExitStack() as kept:
        for found in megatron.timers_in_use(configs):
            for record in megatron.timer_records(found):
                kept.enter_context(structure_kept(record))
        for config in configs:
            kept.enter_context(swapped(config, "timers", None))
        yield
