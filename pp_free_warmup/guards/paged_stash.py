"""Paged stashing of expert activations, which learns the schedule's order from the first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import lent


@contextmanager
def paged_stash(_call: ScheduleCall) -> Iterator[None]:
    """Run the pass without stashing, and let the real step be the first that is seen.

    Changed by: every forward, which counts microbatches and layers; the first, which is the plan.
    Put back by: lending the manager away (one made meanwhile starts switched off), then the old one.
    Missed by: an assertion in step 0: the schedule is not the one that was recorded.
    """
    with lent(megatron.stash_plan()):
        yield
