"""Check once that the installed Megatron is laid out as this library relies on.

A renamed parameter must stop the warmup by name; guessing would warm the wrong
thing, or exchange real tensors while opening channels.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core import __version__ as megatron_version
from megatron.core.pipeline_parallel import combined_1f1b, schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from pp_free_warmup._megatron.schedule import REQUIRED_KEYWORDS, SCHEDULE_NAMES
from pp_free_warmup.errors import UnsupportedMegatron

LEADING = (
    "forward_step_func",
    "data_iterator",
    "model",
    "num_microbatches",
    "input_tensor",
    "forward_data_store",
    "config",
)
TAKES = {
    "forward_step": {
        *LEADING,
        "cp_group_size",
        "collect_non_loss_data",
        "checkpoint_activations_microbatch",
        "is_first_microbatch",
        "current_microbatch",
        "vp_stage",
        "is_last_stage",
    },
    "backward_step": {"input_tensor", "output_tensor", "output_tensor_grad", "model_type", "config"},
    "get_tensor_shapes": {
        "seq_length",
        "micro_batch_size",
        "decoder_seq_length",
        "config",
        "tp_group",
        "cp_group",
        "pp_group",
        "is_recv",
    },
    "deallocate_output_tensor": {"out", "deallocate_pipeline_outputs"},
    "check_first_val_step": {"first_val_step", "forward_only", "cond"},
}
COMBINED = {
    *(LEADING[0], LEADING[1], "f_model", *LEADING[3:6], "b_model", "b_input_tensor", "b_output_tensor"),
    *("b_output_tensor_grad", "config", "f_model_chunk_id", "collect_non_loss_data"),
    *("is_first_microbatch", "current_microbatch"),
}
COMMUNICATE = {
    "self",
    "tensor_send_next",
    "tensor_send_prev",
    "recv_prev",
    "recv_next",
    "tensor_shape",
    "wait_on_reqs",
}


def check_contract() -> None:
    """Raise if a function that the warmup calls has another form than in 0.14 to 0.19.

    Functions that passed once are not read again: a decorated step comes here at every call.

    Raises:
        UnsupportedMegatron: Names the function, what was found and what was expected.
    """
    found = _relied_on()
    if len(_passed) == len(found) and all(map(operator.is_, found, _passed)):
        return
    problem = next(_problems(), None)
    if problem is None:
        _passed[:] = found
        return
    name, seen, expected = problem
    raise UnsupportedMegatron(
        f"megatron-core {megatron_version.partition('+')[0]} is not supported: {name} has an unknown form.",
        found=f"{seen}; expected {expected}.",
        matters="A warmup built on a guess could run the wrong step or exchange real tensors.",
        do="Install megatron-core 0.14 to 0.19, or set PP_FREE_WARMUP=0 to run without the warmup.",
    )


_passed: list[Any] = []


def _relied_on() -> list[Any]:
    functions = [getattr(schedules, name, None) for name in (*SCHEDULE_NAMES, *TAKES)]
    return [*functions, _combined(), getattr(P2PCommunicator, "_communicate", None)]


def _combined() -> Any:
    return getattr(combined_1f1b, "combined_forward_backward_step", None)


def _problems() -> Iterator[tuple[str, str, str]]:
    for name in SCHEDULE_NAMES:
        yield from _lacking(f"schedules.{name}", getattr(schedules, name, None), REQUIRED_KEYWORDS)
    yield from _lacking("schedules.forward_step", getattr(schedules, "forward_step", None), set(LEADING))
    for name, known in TAKES.items():
        yield from _unknown(f"schedules.{name}", getattr(schedules, name, None), known)
    yield from _lacking("combined_1f1b.combined_forward_backward_step", _combined(), COMBINED)
    yield from _unknown("combined_1f1b.combined_forward_backward_step", _combined(), COMBINED)
    communicate = getattr(P2PCommunicator, "_communicate", None)
    yield from _lacking("P2PCommunicator._communicate", communicate, COMMUNICATE)
    yield from _unknown("P2PCommunicator._communicate", communicate, COMMUNICATE)


def _lacking(
    name: str, function: Callable[..., Any] | None, needed: set[str] | frozenset[str]
) -> Iterator[tuple[str, str, str]]:
    if function is None:
        yield name, "nothing by that name", "a function"
        return
    there = set(inspect.signature(function).parameters)
    if not needed <= there:
        yield name, f"no parameter {', '.join(sorted(needed - there))}", f"all of {', '.join(sorted(needed))}"


def _unknown(name: str, function: Callable[..., Any] | None, known: set[str]) -> Iterator[tuple[str, str, str]]:
    """Report parameters without a default that nobody here would fill; one with a default is harmless."""
    if function is None:
        yield name, "nothing by that name", "a function"
        return
    for parameter in inspect.signature(function).parameters.values():
        optional = parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if parameter.name not in known and not optional:
            yield name, f"a required parameter {parameter.name!r}", f"only {', '.join(sorted(known))}"
