"""The detector of slow ranks, which times every forward step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import attributes_kept, swapped


@contextmanager
def straggler_timer(_call: ScheduleCall) -> Iterator[None]:
    """Keep the compile time of the pass out of the report on slow ranks.

    Changed by: ``with stimer:`` in a trainer's forward step.
    Put back by: lending the methods it uses when it is off; then its own.
    Missed by: the first report, which would call the rank with the most to compile a straggler.
    """
    timer = megatron.straggler_timer()
    with (
        swapped(timer, "start", timer.null_method),
        swapped(timer, "stop", timer.null_method),
        attributes_kept(timer, ("bdata",)),
    ):
        yield
