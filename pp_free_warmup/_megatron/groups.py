"""The process groups that one schedule call uses: the caller's own, else Megatron's globals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch.distributed import distributed_c10d


@dataclass(frozen=True, eq=False, slots=True)
class Groups:
    """The groups of one schedule call.

    Attributes:
        pipeline: Neighbouring stages; one rank per stage.
        tensor: Tensor parallelism.
        context: Context parallelism.
        stage: Groups that together span this stage's ranks, to be walked in this order:
            usually one (tensor x data x context), else tensor and then data x context; empty when
            the caller gave groups that do not say.
        communicator: The caller's own P2PCommunicator, or None.
    """

    pipeline: Any
    tensor: Any
    context: Any
    stage: tuple[Any, ...]
    communicator: Any


def is_initialized() -> bool:
    """Tell whether Megatron's model-parallel groups exist."""
    return bool(parallel_state.model_parallel_is_initialized())


def has_stages() -> bool:
    """Tell whether Megatron's own pipeline group exists and has more than one rank."""
    return is_initialized() and parallel_state.get_pipeline_model_parallel_world_size() > 1


def generation_of(keywords: Mapping[str, Any]) -> Any:
    """Return the group object whose channels a call uses: a new one after groups were rebuilt."""
    return inner_group(pipeline_group_of(keywords))


def inner_group(group: Any) -> Any:
    """Return the process group itself where *group* is a wrapper that can rebuild it.

    Such a wrapper (miles' ReloadableProcessGroup) stays the same object and keeps the real one as
    ``.group``.
    """
    within = None if type(group) is torch.distributed.ProcessGroup else getattr(group, "group", None)
    return within if isinstance(within, torch.distributed.ProcessGroup) else group


def store_of_world() -> Any:
    """Return the key-value store that all ranks reach, or None where groups meet without one (MPI)."""
    return distributed_c10d._get_process_group_store(distributed_c10d._get_default_group())


def pipeline_group_of(keywords: Mapping[str, Any]) -> Any:
    """Return the pipeline group of a call; cheap, for the path that every warm call takes."""
    communicator = keywords.get("p2p_communicator")
    if communicator is not None:
        return getattr(communicator, "pp_group", None)  # a multi-module communicator has none
    return parallel_state.get_pipeline_model_parallel_group()


def groups_of(keywords: Mapping[str, Any]) -> Groups:
    """Read the groups of a call as the schedules themselves do.

    The caller's collection is called ``grad_finalize_pgs`` in 0.14 and ``pg_collection`` from 0.15.
    """
    communicator = keywords.get("p2p_communicator")
    collection = keywords.get("pg_collection", keywords.get("grad_finalize_pgs"))
    if communicator is None and collection is None:
        return Groups(
            pipeline=parallel_state.get_pipeline_model_parallel_group(),
            tensor=parallel_state.get_tensor_model_parallel_group(),
            context=parallel_state.get_context_parallel_group(),
            stage=(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),),
            communicator=None,
        )
    tensor, context = _set(collection, "tp"), _set(collection, "cp")
    return Groups(
        pipeline=pipeline_group_of(keywords),
        tensor=tensor if tensor is not None else parallel_state.get_tensor_model_parallel_group(),
        context=context if context is not None else parallel_state.get_context_parallel_group(),
        stage=_stage_groups(collection),
        communicator=communicator,
    )


def _stage_groups(collection: Any) -> tuple[Any, ...]:
    whole = _set(collection, "tp_dp_cp")
    if whole is not None:
        return (whole,)
    tensor, data = _set(collection, "tp"), _set(collection, "dp_cp")
    return () if tensor is None or data is None else (tensor, data)


def _set(collection: Any, name: str) -> Any:
    """Return a group that is there and set (from 0.19 a declared but unset field reads as None)."""
    return getattr(collection, name, None)
