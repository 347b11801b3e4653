"""One forward (and backward) of every model chunk, without any neighbour.

Megatron's own step functions, the caller's own forward step, loss and first
batch; only what a neighbouring stage would have sent is made up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._activations import Neighbours
from pp_free_warmup._batches import Batches
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._report import Stopwatch

Told = Callable[[str, int], None]


def run_local_pass(
    call: ScheduleCall, batches: Batches, neighbours: Neighbours, stopwatch: Stopwatch, told: Told
) -> None:
    """Run forward and, in a training call, backward of each chunk once, chunk after chunk.

    Args:
        call: The schedule call that is being prepared. Its grad mode is the caller's.
        batches: Serves the first batch of each chunk.
        neighbours: Makes what arrives, and learns what went through.
        stopwatch: Receives ``forward`` and ``backward`` seconds per chunk.
        told: Called with a phase and a number that only rises, before each step: the sign of life.

    Raises:
        Exception: Whatever the model, the loss or the forward step raises; nothing is caught here.
    """
    for index, chunk in enumerate(call.chunks):
        inputs = neighbours.activations(index)
        with megatron.without_gradient_sync(chunk, call.config, index):
            told(f"forward of chunk {index}", 2 * index)
            with stopwatch.measure("forward", index), neighbours.arriving(index, inputs):
                outputs = _forward(call, batches, index, inputs)
            neighbours.put_out(index, outputs)
            if call.forward_only:
                continue
            told(f"backward of chunk {index}", 2 * index + 1)
            with stopwatch.measure("backward", index):
                _backward(call, neighbours, index, inputs, outputs)


def _forward(call: ScheduleCall, batches: Batches, index: int, inputs: list[Any]) -> list[Any]:
    keywords = call.keywords
    step = megatron.combined_forward if _is_combined(call) else megatron.forward_step
    output, _ = step(
        leading=(
            _telling_loss(call),
            batches.for_pass(index),
            call.chunks[index],
            call.num_microbatches,
            inputs[0] if call.interleaved else inputs,
            [],
            call.config,
        ),
        cp_group_size=call.groups.context.size(),
        collect_non_loss_data=keywords.get("collect_non_loss_data", False),
        checkpoint_activations_microbatch=_first_is_recomputed(call),
        is_first_microbatch=megatron.is_first_microbatch(keywords),
        current_microbatch=0,
        vp_stage=index if call.interleaved else None,
        is_last_stage=megatron.is_last(call.groups, index, len(call.chunks)),
    )
    return list(output) if isinstance(output, list) else [output]


def _telling_loss(call: ScheduleCall) -> Callable[..., Any]:
    """Return the caller's forward step; who asked for it is shown the loss function that it returns."""
    own = call.keywords["forward_step_func"]

    def step(*given: Any, **named: Any) -> Any:
        output, loss = own(*given, **named)
        for look in call.before_loss:
            look(loss)
        return output, loss

    return step


def _backward(call: ScheduleCall, neighbours: Neighbours, index: int, inputs: list[Any], outputs: list[Any]) -> None:
    gradients: list[Any] = [None]
    if not megatron.is_last(call.groups, index, len(call.chunks)):
        gradients = list(neighbours.gradients(outputs))
        megatron.release_output(outputs[0], call.config)
    step = megatron.combined_backward if _is_combined(call) else megatron.backward_step
    step(inputs, outputs, gradients, model=call.chunks[index], config=call.config)


def _is_combined(call: ScheduleCall) -> bool:
    return megatron.is_combined(call.config, forward_only=call.forward_only)


def _first_is_recomputed(call: ScheduleCall) -> bool | None:
    """Return ``checkpoint_activations_microbatch`` of microbatch 0: it is first in its window, in both schedules."""
    partial = call.config.num_microbatches_with_partial_activation_checkpoints
    return None if partial is None else partial <= 0
