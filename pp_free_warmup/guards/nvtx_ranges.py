"""Profiler ranges that are still open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._structure import structure_kept


@contextmanager
def nvtx_ranges(_call: ScheduleCall) -> Iterator[None]:
    """Close the ranges that a failed pass leaves open.

    Changed by: every layer, which opens a range and, unless it raises, closes it.
    Put back by: closing what was opened meanwhile, then the old list of names.
    Missed by: a profiled run that goes on after a failed warmup: the next range to end raises.
    """
    ranges = megatron.nvtx_ranges()
    before = len(ranges)
    with structure_kept(ranges):
        try:
            yield
        finally:
            for message in reversed(ranges[before:]):
                megatron.close_nvtx_range(message)
