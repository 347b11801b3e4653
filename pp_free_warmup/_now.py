"""`warmup_now`: the same warmup at a moment of the caller's choice, without a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import _patch
from pp_free_warmup._call import chunks_of, refuse_impossible
from pp_free_warmup._options import Options
from pp_free_warmup._report import WarmupReport
from pp_free_warmup._warmup import pipeline_warmup
from pp_free_warmup.errors import UnsupportedSetup

OPTIONS = {field.name for field in fields(Options)}


def warmup_now(
    model: torch.nn.Module | Iterable[torch.nn.Module],
    optimizer: Any = None,
    *,
    batch: Any = None,
    schedule: Callable[..., Any] | None = None,
    **keywords: Any,
) -> WarmupReport:
    """Warm a pipeline now: before a checkpoint is loaded, or while data and rollouts are still to come.

    All ranks of the pipeline come here together. The first real call of that kind finds everything
    warm and runs as it is, in a block or not, whatever was loaded into the parameters since.

    Args:
        model: A chunk or a list of chunks, as the schedule will get it.
        optimizer: As for `pipeline_warmup`.
        batch: What ``next(data_iterator)`` will give, for every chunk of this rank; it stays as it is. None:
            this rank reads no data, or a ``data_iterator`` is given, of which one microbatch is used up.
        schedule: What the real call will call; None takes what Megatron chooses now.
        **keywords: What the schedule will be called with (``forward_step_func``, ``num_microbatches``,
            ``seq_length``, ``micro_batch_size``, ``forward_only=True`` for log-probs), and options of
            `pipeline_warmup`.

    Returns:
        The report; ``outcome`` is ``"skipped"`` where nothing is to be done, and says why.

    Raises:
        UnsupportedSetup: A keyword that neither takes, two sources of data, an option that cannot be.
        WrongCall: A keyword is missing that every schedule requires.
    """
    chunks = chunks_of(model)
    options = {name: keywords.pop(name) for name in OPTIONS & keywords.keys()}
    block = pipeline_warmup(chunks, optimizer, **options)
    call = {"forward_only": False, **keywords, **_model_and_data(chunks, batch, keywords)}
    refuse_impossible(call)
    chosen = _patch.inner_schedule(schedule or megatron.schedule_module().get_forward_backward_func())
    _refuse_unknown(chosen, call)
    with block:
        block.prepare(chosen, call)
    return block.report


def _model_and_data(chunks: list[Any], batch: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return both as the schedule takes them: as lists only where there are several chunks.

    Raises:
        UnsupportedSetup: There are two sources of data.
    """
    data = keywords.get("data_iterator")
    if batch is not None and data is not None:
        raise UnsupportedSetup(
            "A warmup was given two sources of data.",
            found="batch= and data_iterator=; expected one of them, or neither.",
            matters="Only one can be what the forward step reads.",
            do="Leave the iterator out; a batch says all that a warmup needs.",
        )
    made = [None if batch is None else iter((batch,)) for _ in chunks]
    several = len(chunks) > 1
    given = made if several else made[0]
    return {"model": chunks if several else chunks[0], "data_iterator": given if data is None else data}


def _refuse_unknown(schedule: Callable[..., Any], call: dict[str, Any]) -> None:
    known = inspect.signature(schedule).parameters
    unknown = sorted(call.keys() - known.keys())
    if unknown and not any(each.kind is each.VAR_KEYWORD for each in known.values()):
        raise UnsupportedSetup(
            "warmup_now was given a keyword that means nothing.",
            found=f"{', '.join(unknown)}; expected options of pipeline_warmup and keywords of {schedule.__name__}.",
            matters="A choice that is silently ignored would look as if it had worked.",
            do="Correct its name, or leave it out.",
        )
