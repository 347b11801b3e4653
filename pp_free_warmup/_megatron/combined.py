"""Megatron's combined step, of which a local pass runs one direction at a time.

With ``overlap_moe_expert_parallel_comm`` the interleaved schedule runs the forward of one microbatch
and the backward of another as a single `combined_forward_backward_step`, layer by layer, so that the
one's expert all-to-all hides behind the other's arithmetic. It runs the first forward and the last
backward alone, which is what a local pass asks for
(megatron/core/pipeline_parallel/combined_1f1b.py; the signature is the same in 0.14 to 0.19).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from megatron.core.pipeline_parallel import combined_1f1b


def is_combined(config: Any, *, forward_only: bool) -> bool:
    """Tell whether the schedule of this call runs combined steps; forward-only calls never do."""
    return bool(getattr(config, "overlap_moe_expert_parallel_comm", False)) and not forward_only


def combined_forward(*, leading: tuple[Any, ...], **offered: Any) -> tuple[Any, Any]:
    """Run the forward alone; takes and returns what `forward_step` does.

    The output carries the plan and the loss that its backward needs.

    Args:
        leading: The seven leading arguments of `forward_step`. The combined schedule takes no partial
            activation checkpoints.
        **offered: As for `forward_step`; ``vp_stage`` is the chunk's index.
    """
    function, iterator, chunk, microbatches, inputs, losses, config = leading
    _start_streams(config)
    output, tokens, _ = combined_1f1b.combined_forward_backward_step(
        function,
        iterator,
        chunk,
        microbatches,
        inputs,
        losses,
        None,
        None,
        None,
        None,
        config,
        f_model_chunk_id=offered["vp_stage"],
        collect_non_loss_data=offered["collect_non_loss_data"],
        is_first_microbatch=offered["is_first_microbatch"],
        current_microbatch=offered["current_microbatch"],
    )
    return output, tokens


def combined_backward(
    input_tensor: list[Any], output: list[Any], gradient: list[Any], *, model: torch.nn.Module, config: Any
) -> Any:
    """Run the backward of an output of `combined_forward` alone; takes what `backward_step` does."""
    step = combined_1f1b.combined_forward_backward_step
    _, _, gradients = step(None, None, None, 1, None, [], model, input_tensor, output, gradient, config)
    return gradients


def _start_streams(config: Any) -> None:
    """Make the stream for all-to-all, as the schedule does before its first step; it is made once per process."""
    wanted = inspect.signature(combined_1f1b.set_streams).parameters
    priority = {"high_priority": config.high_priority_a2a_comm_stream} if "high_priority" in wanted else {}  # 0.19
    combined_1f1b.set_streams(**priority)
