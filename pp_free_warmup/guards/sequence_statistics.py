"""Sums of packed sequence lengths, from which a training log computes FLOPs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import lent


@contextmanager
def sequence_statistics(_call: ScheduleCall) -> Iterator[None]:
    """Keep the first batch from being counted twice.

    Changed by: a forward step on packed sequences (`pretrain_gpt.py`).
    Put back by: lending none, then the old sums and the flag that says they are in use.
    Missed by: the throughput in the first log line.
    """
    with lent(megatron.sequence_statistics()):
        yield
