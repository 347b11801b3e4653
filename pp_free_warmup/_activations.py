"""What a neighbour would have sent: the right shape, dtype and kind of tensor, with random values.

Random, never constant: equal hidden states send every token of a top-k router to
the same experts, which never happens in training and can exhaust or hang a fused
expert kernel. The values come from a generator of their own, so that the caller's
random streams do not move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import swapped

SEED = 0x5EED


class Neighbours:
    """Make the activations and gradients that the stages next to this one would send.

    Args:
        call: The schedule call; its config gives the dtype (``pipeline_dtype``).
    """

    def __init__(self, call: ScheduleCall) -> None:
        self._call = call
        self._device = _device_of(call)
        self._generator = torch.Generator(self._device)
        self._generator.manual_seed(SEED + torch.distributed.get_rank())

    def activations(self, chunk: int) -> list[torch.Tensor | None]:
        """Return what `recv_forward` would return for this chunk's first microbatch.

        Args:
            chunk: Index of the model chunk.

        Returns:
            One tensor ``[sequence, microbatch, hidden]`` per received shape, each a leaf that
            requires grad, as P2PCommunicator allocates them; ``[None]`` on the first stage.
            Where lengths vary, one element stands in until `arriving` has seen the batch.
        """
        call = self._call
        if megatron.is_first(call.groups, chunk, len(call.chunks)):
            return [None]
        shapes = megatron.receive_shapes(call.keywords, call.config, call.groups, call.interleaved)
        return [self.made_up(self._whole(chunk, shape or (1, 1, call.config.hidden_size))) for shape in shapes]

    def _whole(self, chunk: int, shape: megatron.Shape) -> megatron.Shape:
        """Lengthen a shape by the predictions that arrive behind the model's own hidden states."""
        last = chunk == len(self._call.chunks) - 1
        parts = megatron.hidden_states_in(self._call.config, self._call.groups, last_chunk=last)
        return (parts * shape[0], *shape[1:])

    def gradients(self, outputs: list[Any]) -> list[torch.Tensor | None]:
        """Return what `recv_backward` would return: a gradient as large as each output that was sent."""
        return [self.made_up(tuple(output.shape)) if output is not None else None for output in outputs]

    def made_up(self, shape: megatron.Shape) -> torch.Tensor:
        """Make one random tensor as the P2P code would have received it."""
        values = torch.randn(shape, generator=self._generator, device=self._device, dtype=torch.float32)
        return values.to(self._call.config.pipeline_dtype).requires_grad_()

    @contextmanager
    def arriving(self, chunk: int, inputs: list[torch.Tensor | None]) -> Iterator[None]:
        """Give the chunk its activation once the length is known, where lengths vary.

        With ``variable_seq_lengths`` no shape says how long the first microbatch is; what
        ``forward_step_func`` hands to the model does. A forward pre-hook on the module that owns
        ``set_input_tensor``, and a wrapper around the model's ``build_schedule_plan``, see it before
        the model reads its input's length, and put the made-up activation both there and into
        *inputs*, from which the backward step takes it.
        """
        owner = megatron.owner_of_input(self._call.chunks[chunk])
        if inputs == [None] or not self._call.config.variable_seq_lengths or owner is None:
            yield
            return

        def bind(module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            call = self._call
            shape = megatron.arriving_shape(call.keywords, call.config, call.groups, positional, named)
            inputs[:] = [self.made_up(self._whole(chunk, shape))]
            module.set_input_tensor(list(inputs))

        hook = owner.register_forward_pre_hook(bind, with_kwargs=True)
        try:
            with _planning(megatron.unwrapped(self._call.chunks[chunk]), bind):
                yield
        finally:
            hook.remove()


@contextmanager
def _planning(model: Any, bind: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Call *bind* before the model plans a combined step, which does not call it as a module."""
    plan = getattr(model, "build_schedule_plan", None)
    if plan is None:
        yield
        return

    def bound(*positional: Any, **named: Any) -> Any:
        bind(model, positional, named)
        return plan(*positional, **named)

    with swapped(model, "build_schedule_plan", bound):
        yield


def _device_of(call: ScheduleCall) -> torch.device:
    parameter = next(call.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
