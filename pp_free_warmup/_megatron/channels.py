"""The pipeline's own way of sending to a neighbour, and the groups that reduce after the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from pp_free_warmup._megatron.groups import Groups
from pp_free_warmup._megatron.shapes import Shape
from pp_free_warmup._undo import swapped


def communicator_of(groups: Groups, config: Any) -> Any:
    """Return the caller's P2PCommunicator, else one made as the schedules make theirs (0.14 to 0.19)."""
    return groups.communicator if groups.communicator is not None else P2PCommunicator(groups.pipeline, config)


def exchange(communicator: Any, shape: Shape, *, forward: bool, wraps: bool) -> None:
    """Send one number to the neighbour in one direction, and receive the other neighbour's.

    Goes through Megatron's `_communicate` and so takes its groups (with two stages, unbatched, also
    WORLD), its order (even ranks send first, odd ranks receive first) and its exchange of shapes.

    Args:
        communicator: A P2PCommunicator.
        shape: What to send, see `probe_shape`.
        forward: Towards the last stage, else towards the first.
        wraps: Also between the last stage and the first, as virtual stages need.
    """
    group, config = communicator.pp_group, communicator.config
    before = wraps or group.rank() > 0
    after = wraps or group.rank() < group.size() - 1
    number = torch.zeros(shape, device=torch.cuda.current_device(), dtype=config.pipeline_dtype)
    communicator._communicate(
        tensor_send_next=number if forward and after else None,
        tensor_send_prev=number if not forward and before else None,
        recv_prev=forward and before,
        recv_next=not forward and after,
        tensor_shape=shape,
    )


@contextmanager
def transfers_counted() -> Iterator[list[None]]:
    """Collect one entry for each exchange with a neighbour during the block, whoever asks for it.

    All of the pipeline's sends and receives go through `_communicate` (0.14 to 0.19).
    """
    own = P2PCommunicator._communicate
    counted: list[None] = []

    def counting(communicator: Any, **asked: Any) -> Any:
        counted.append(None)
        return own(communicator, **asked)

    with swapped(P2PCommunicator, "_communicate", counting):
        yield counted


Getter = Callable[..., Any]


def reduction_groups(keywords: Mapping[str, Any], config: Any, chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the groups that a training step reduces in after the pipeline, by name.

    The order is the same on all ranks, and so are the conditions: the groups of one name share no
    rank, so opening them name by name cannot wait in a circle. Groups that the local pass uses
    (tensor, context, expert) are not among them.

    Args:
        keywords: The keywords of a schedule call; its ``pg_collection``, if given, is asked first.
        config: Megatron's config of the first chunk.
        chunks: The model chunks; a DDP chunk says whether the optimizer is distributed.

    Yields:
        Name and group; only groups that exist, have this rank as a member and more than one rank.
    """
    collection = keywords.get("pg_collection", keywords.get("grad_finalize_pgs"))
    wrappers = [getattr(chunk, "ddp_config", None) for chunk in chunks]
    wanted = {
        "expert": bool(getattr(config, "num_moe_experts", None)),
        "token loss": bool(getattr(config, "calculate_per_token_loss", False)),
        "distributed optimizer": any(getattr(one, "use_distributed_optimizer", False) for one in wrappers),
    }
    for name, getter, only_if in REDUCTIONS:
        if only_if and not wanted[only_if]:
            continue
        group = getter() if collection is None else getattr(collection, name, None)
        if isinstance(group, torch.distributed.ProcessGroup) and group.size() > 1:
            yield name, group


def _of_state(name: str, **keywords: Any) -> Getter:
    """Return a function that asks Megatron's global groups, without insisting that they exist."""

    def get() -> Any:
        getter = getattr(parallel_state, name)
        try:
            return getter(**keywords)
        except AssertionError:  # Megatron's way of saying that this run made no such group
            return None

    return get


# pg_collection's field, Megatron's global, and when a step uses it; 0.14 to 0.19
REDUCTIONS: tuple[tuple[str, Getter, str], ...] = (
    ("dp_cp", _of_state("get_data_parallel_group", with_context_parallel=True), ""),
    (
        "intra_dp_cp",
        _of_state("get_data_parallel_group", with_context_parallel=True, partial_data_parallel=True),
        "distributed optimizer",
    ),
    ("expt_dp", _of_state("get_expert_data_parallel_group"), "expert"),
    ("intra_expt_dp", _of_state("get_expert_data_parallel_group", partial_expert_data_parallel=True), "expert"),
    ("inter_dist_opt", _of_state("get_inter_distributed_optimizer_instance_group"), "distributed optimizer"),
    ("embd", _of_state("get_embedding_group"), ""),
    ("pos_embd", _of_state("get_position_embedding_group"), ""),
    ("tp_dp_cp", _of_state("get_tensor_and_data_parallel_group", with_context_parallel=True), "expert"),
    ("pp", _of_state("get_pipeline_model_parallel_group"), "token loss"),
    ("mp", _of_state("get_model_parallel_group"), ""),
    ("tp_ep_pp", _of_state("get_expert_tensor_model_pipeline_parallel_group"), "expert"),
    ("intra_dist_opt", _of_state("get_intra_distributed_optimizer_instance_group"), "distributed optimizer"),
)
