"""Which phase of activation recomputation runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import _transformer_engine as te
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._structure import structure_kept
from pp_free_warmup._undo import attributes_kept


@contextmanager
def recompute_flags(_call: ScheduleCall) -> Iterator[None]:
    """Keep the flags down that a failed pass leaves up.

    Changed by: a checkpointed layer, which sets them and, unless it raises, takes them back.
    Put back by: the old values.
    Missed by: a run that goes on after a failed warmup and takes every layer for a recomputed one.
    """
    with ExitStack() as kept:
        kept.enter_context(structure_kept(te.recompute_queue()))
        for owner, names in chain(megatron.checkpointing_flag(), te.recompute_flags()):
            kept.enter_context(attributes_kept(owner, names))
        yield
