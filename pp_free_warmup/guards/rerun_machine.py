"""Megatron's rerun state machine, which judges losses and can end the job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._structure import structure_kept
from pp_free_warmup._undo import attributes_kept, swapped


@contextmanager
def rerun_machine(call: ScheduleCall) -> Iterator[None]:
    """Let nobody judge the loss of made-up activations.

    Changed by: loss functions that call ``validate_result``: it counts, may ask for a rerun, and raises on NaN.
    Put back by: replacing that method for the pass; the machine's own fields and counters as they were.
    Missed by: the rerun that is asked for, which can end the job; the counters.
    """
    del call  # one machine per process
    module, validator = megatron.rerun_module(), megatron.rerun_validator()
    with ExitStack() as lent:
        lent.enter_context(attributes_kept(module, [megatron.RERUN_MACHINE]))
        lent.enter_context(structure_kept(validator))
        lent.enter_context(swapped(validator, "validate_result", _no_judgement))
        yield


def _no_judgement(*_arguments: Any, **_keywords: Any) -> None:
    """Stand in for ``validate_result``."""
