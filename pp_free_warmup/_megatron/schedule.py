"""Megatron's schedules and step functions, called as their own signatures ask.

`forward_step` and `backward_step` changed parameters between releases
(``model_type`` left in 0.17, ``cp_group_size`` is required from 0.14), so each
call is built from the signature of the *original* function, and the function
itself is looked up at call time: third parties replace some of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.utils import get_model_config, get_model_type

from pp_free_warmup._megatron.groups import Groups

INTERLEAVED = "forward_backward_pipelining_with_interleaving"
NO_PIPELINING = "forward_backward_no_pipelining"
SCHEDULE_NAMES = (
    NO_PIPELINING,
    INTERLEAVED,
    "forward_backward_pipelining_without_interleaving",
)
REQUIRED_KEYWORDS = frozenset(
    {"forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length", "micro_batch_size"}
)
FULLY_SHARDED = {
    *("MegatronFSDP", "FullyShardedDataParallel", "TorchFullyShardedDataParallel", "FSDPModule"),
    # The branch main, 2026-08: the adapter's two kinds, and the base that its second kind mixes into each module.
    *("FullyShardedDataParallelV1", "FullyShardedDataParallelV2", "FsdpModule"),
}


def schedule_module() -> Any:
    """Return the module in whose globals `get_forward_backward_func` looks the schedules up."""
    return schedules


def config_of(chunk: torch.nn.Module) -> Any:
    """Return the Megatron config of a model chunk, wrapped or not."""
    return get_model_config(chunk)


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the innermost module behind wrappers that keep theirs as ``.module`` (DDP, Float16Module)."""
    while isinstance(inner := vars(chunk).get("_modules", {}).get("module"), torch.nn.Module):
        chunk = inner
    return chunk


def is_encoder_decoder(chunk: torch.nn.Module) -> bool:
    """Tell whether the chunk is of an encoder-decoder model (a model type that exists up to 0.16)."""
    faces = (chunk, unwrapped(chunk))
    return any(getattr(getattr(face, "model_type", None), "name", "") == "encoder_and_decoder" for face in faces)


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Tell whether the module is a wrapper that shards parameters (Megatron-FSDP, torch FSDP2), by class name."""
    return any(kind.__name__ in FULLY_SHARDED for kind in type(module).__mro__)


def owner_of_input(chunk: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module whose ``set_input_tensor`` `schedules.forward_step` calls for this chunk."""
    inner: Any = chunk
    while not hasattr(inner, "set_input_tensor"):
        inner = getattr(inner, "module", None)
        if inner is None:
            return None
    assert isinstance(inner, torch.nn.Module)
    return inner


def is_first(groups: Groups, chunk: int, chunks: int) -> bool:
    """Tell whether this chunk is the pipeline's first, where no activation arrives."""
    return bool(is_pp_first_stage(groups.pipeline)) and chunk == 0 and chunks > 0


def is_last(groups: Groups, chunk: int, chunks: int) -> bool:
    """Tell whether this chunk is the pipeline's last, where the loss is computed."""
    return bool(is_pp_last_stage(groups.pipeline)) and chunk == chunks - 1


def forward_step(*, leading: tuple[Any, ...], **offered: Any) -> tuple[Any, Any]:
    """Run Megatron's `forward_step`: seven leading arguments by position, the rest by name.

    Args:
        leading: ``forward_step_func, data_iterator, model, num_microbatches, input_tensor,
            forward_data_store, config``: the same in 0.14 to 0.19.
        **offered: Everything else that some release takes.

    Returns:
        The output (tensor or list, as the input was) and the number of tokens.
    """
    function = schedules.forward_step
    wanted = list(inspect.signature(function).parameters)[len(leading) :]
    output, tokens = function(*leading, **{name: offered[name] for name in wanted if name in offered})
    return output, tokens


def backward_step(input_tensor: Any, output: Any, gradient: Any, *, model: torch.nn.Module, config: Any) -> Any:
    """Run Megatron's `backward_step` (it takes ``model_type`` up to 0.16)."""
    offered = {
        "input_tensor": input_tensor,
        "output_tensor": output,
        "output_tensor_grad": gradient,
        "config": config,
    }
    if "model_type" in inspect.signature(schedules.backward_step).parameters:
        offered["model_type"] = get_model_type(model)
    return called_by_name(schedules.backward_step, offered)


def release_output(output: torch.Tensor, config: Any) -> None:
    """Drop the output's storage as the schedule does once it is sent (`custom_backward` asserts it)."""
    schedules.deallocate_output_tensor(output, config.deallocate_pipeline_outputs)


def is_first_microbatch(keywords: Mapping[str, Any]) -> bool:
    """Return the flag that the schedule passes with its first microbatch."""
    forward_only = keywords.get("forward_only", False)
    return bool(schedules.check_first_val_step(keywords.get("first_val_step"), forward_only, True))


def without_gradient_sync(chunk: torch.nn.Module, config: Any, index: int) -> AbstractContextManager[Any]:
    """Return the context that keeps data-parallel reductions out: the chunk's own, else the config's.

    Megatron's schedules take ``config.no_sync_func`` alone, a callable or a list with one per chunk;
    its DDP offers the same as ``no_sync`` even when the trainer did not set it.
    """
    own = getattr(chunk, "no_sync", None)
    if own is not None:
        return _as_context(own())
    configured = config.no_sync_func
    if isinstance(configured, (list, tuple)):
        stack = ExitStack()
        stack.enter_context(configured[index]())
        return stack
    return nullcontext() if configured is None else _as_context(configured())


def _as_context(context: Any) -> AbstractContextManager[Any]:
    assert hasattr(context, "__enter__"), f"no_sync returned {context!r}, which is no context manager"
    return context  # type: ignore[no-any-return]


def called_by_name(function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    """Call *function* with those of the offered arguments that its signature has."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return function(**offered)
    return function(**{p.name: offered[p.name] for p in parameters if p.name in offered})
