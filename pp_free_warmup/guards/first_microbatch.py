"""The flag by which layers know a step's first microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import entries_kept

# The second is Megatron's own list of the modules that have the first (`MegatronModule.set_is_first_microbatch`).
NAMES = ("is_first_microbatch", "modules_with_is_first_microbatch")


@contextmanager
def first_microbatch(call: ScheduleCall) -> Iterator[None]:
    """Let the real first microbatch be the first one.

    Changed by: Transformer Engine's linear layers, which clear the flag in their first forward.
    Put back by: the flags as they were.
    Missed by: weights that were cached in FP8 in the pass and are not cast again in the first step.
    """
    with entries_kept(map(vars, call.modules()), NAMES):
        yield
