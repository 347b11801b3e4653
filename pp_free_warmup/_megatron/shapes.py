"""What travels between two stages: how many tensors, of which dimensions.

All of it comes from the release's own `get_tensor_shapes`, which models with several residual streams
widen or replace (Megatron's dev branch: ``hidden x streams``; miles: ``[s, b, streams, hidden]``). Where
lengths vary, the batch says how long an activation is, and nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from pp_free_warmup._megatron.groups import Groups
from pp_free_warmup._megatron.schedule import called_by_name

Shape = tuple[int, ...]


def hidden_states_in(config: Any, groups: Groups, *, last_chunk: bool) -> int:
    """Return how many hidden states arrive, one after the other along the sequence.

    A stage behind one with multi-token prediction alone receives the model's and each prediction's
    (`mtp_standalone`, 0.16 to 0.19; `process_mtp_loss` takes them apart again).

    Args:
        config: Megatron's config.
        groups: The groups of the call.
        last_chunk: Whether it is this stage's last chunk: only there can such layers lie before it.
    """
    if not getattr(config, "mtp_standalone", False) or not last_chunk:
        return 1
    stages = config.pipeline_model_parallel_layout.layout[: groups.pipeline.rank()]
    predicted = any(layer.name == "mtp" for chunks in stages for layer in chunks[-1])
    return 1 + config.mtp_num_layers if predicted else 1


def receive_shapes(keywords: Mapping[str, Any], config: Any, groups: Groups, interleaved: bool) -> list[Shape]:
    """Return the shapes that a stage receives, as ``[(sequence, microbatch, hidden)]``.

    Where lengths vary, sequence and microbatch are the call's: a guess, to be replaced by the batch's.
    The interleaved schedule asks no function (it builds one shape inline, 0.14 to 0.19, from
    ``seq_length`` alone), and all its chunks receive alike; dev's branch widens it as
    `get_tensor_shapes` does for a stage that is not the first.

    Raises:
        TypeError: `get_tensor_shapes` of this release wants something unknown (the contract check
            runs before).
    """
    offered = _offered(keywords, config, groups)
    if interleaved:
        within = groups.pipeline.rank() > 0
        return _shapes({**offered, "decoder_seq_length": None, "is_recv": within})
    receive = _shapes({**offered, "is_recv": True})
    adjust = keywords.get("adjust_tensor_shapes_fn")
    if adjust is not None:
        receive, _ = adjust(receive, _shapes({**offered, "is_recv": False}))
    return [tuple(shape) for shape in receive]


def probe_shape(config: Any, groups: Groups) -> Shape:
    """Return a shape of one element that both ends of a channel can exchange.

    Where they tell each other shapes first, they count on as many numbers as an activation has dimensions.
    """
    if not (config.variable_seq_lengths or getattr(config, "mtp_standalone", False)):
        return (1,)
    least = {"seq_length": groups.context.size() * groups.tensor.size(), "micro_batch_size": 1}
    return (1,) * len(_shapes({**_offered(least, config, groups), "is_recv": groups.pipeline.rank() > 0})[0])


def _offered(keywords: Mapping[str, Any], config: Any, groups: Groups) -> dict[str, Any]:
    seen = copy.copy(config)
    seen.variable_seq_lengths = False  # else some releases return no dimensions at all (0.17 to 0.19)
    return {
        "seq_length": keywords["seq_length"],
        "micro_batch_size": keywords["micro_batch_size"],
        "decoder_seq_length": keywords.get("decoder_seq_length"),
        "config": seen,
        "tp_group": groups.tensor,
        "cp_group": groups.context,
        "pp_group": groups.pipeline,
    }


def _shapes(offered: Mapping[str, Any]) -> list[Shape]:
    return [tuple(shape) for shape in called_by_name(schedules.get_tensor_shapes, offered)]


def arriving_shapes(
    wire: list[Shape],
    keywords: Mapping[str, Any],
    config: Any,
    groups: Groups,
    positional: tuple[Any, ...],
    named: Mapping[str, Any],
) -> list[Shape]:
    """Put the length that a model chunk is given in place of the one in *wire*, what a stage receives.

    Stacks with variable lengths hand it packed sequences and how long each is (slime, miles, verl), or
    token ids of ``[microbatch, sequence]``, cut for context parallelism. verl's later stages get the
    ids before they were packed, dense or nested: so the packing says more than they do. Others
    (Megatron Bridge) pass labels alone on the last stage. Failing all, the call's own ``seq_length``
    counts. The embedding turns tokens into ``[sequence, microbatch, ...]``, divided by the
    tensor-parallel size under sequence parallelism (megatron/core/models/gpt/gpt_model.py, 0.14 to 0.19).
    """
    microbatch, length = (
        _size_of_packed(named.get("packed_seq_params"), groups)
        or _size_of_tokens(positional, named, groups)
        or (keywords["micro_batch_size"], keywords["seq_length"] // groups.context.size())
    )
    length //= groups.tensor.size() if config.sequence_parallel else 1
    return [(length, microbatch, *shape[2:]) for shape in wire]


def _size_of_packed(packed: Any, groups: Groups) -> tuple[int, int] | None:
    """Read the tokens of one context-parallel rank off PackedSeqParams; padded ends count."""
    for name in ("cu_seqlens_q_padded", "cu_seqlens_q"):
        ends = getattr(packed, name, None)
        if isinstance(ends, torch.Tensor):
            return 1, int(ends[-1]) // groups.context.size()
    return None


def _size_of_tokens(positional: tuple[Any, ...], named: Mapping[str, Any], groups: Groups) -> tuple[int, int] | None:
    """Read microbatch and length off the first argument that has one number per token."""
    given = {**dict(zip(("input_ids", "position_ids"), positional, strict=False)), **named}
    for name in ("input_ids", "labels", "position_ids"):
        value = given.get(name)
        if isinstance(value, torch.Tensor) and value.is_nested:  # its sizes are no numbers; not yet packed and cut
            tokens = value.values() if value.layout is torch.jagged else value
            return 1, tokens.numel() // groups.context.size()
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            return int(value.shape[0]), int(value.shape[1])
    return None
