"""Shared experts that overlap with communication, and remember how far they got."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import entries_kept

NAMES = (
    "_overlap_state",  # from 0.18
    "cached_fc1_input",
    "cached_fc2_input",
    "cached_fc2_output",
    "cached_output",
    "gate_score",
)


@contextmanager
def shared_experts(call: ScheduleCall) -> Iterator[None]:
    """Let the real forward find its shared experts idle.

    Changed by: a forward with ``moe_shared_expert_overlap``. A whole one ends where it began; one that an
        error ends half-way leaves its intermediate results and its state.
    Put back by: the old state and results, usually none.
    Missed by: an assertion in the next forward, where the trainer goes on after the error.
    """
    with entries_kept([vars(module) for module in call.modules() if "cached_fc1_input" in vars(module)], NAMES):
        yield
