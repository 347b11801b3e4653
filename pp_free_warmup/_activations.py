"""What a neighbour would have sent: the right shape, dtype and kind of tensor, with random values.

Random, never constant: equal hidden states send every token of a top-k router to
the same experts, which never happens in training and can exhaust or hang a fused
expert kernel. The values come from a generator of their own, so that the caller's
random streams do not move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import swapped
from pp_free_warmup._wire import Load, Parcel, Passage
from pp_free_warmup.errors import UnsupportedSetup

SEED = 0x5EED
Given = Callable[[ScheduleCall, int], Any]


class Neighbours:
    """Make the activations and gradients that the stages next to this one would send.

    Args:
        call: The schedule call; its config gives the dtype (``pipeline_dtype``).
        given: The user's own ``activations``: called with the call and a chunk's index.

    Attributes:
        passages: What each chunk took and put out in the last pass; None where it did not come to that.
    """

    def __init__(self, call: ScheduleCall, given: Given | None = None) -> None:
        self._call = call
        self._given = given
        self._device = _device_of(call)
        self._generator = torch.Generator(self._device)
        self._generator.manual_seed(SEED + torch.distributed.get_rank())
        self._guessing = False
        self.learn([None] * len(call.chunks))

    def learn(self, sent: Sequence[Load | None]) -> None:
        """Take it from here on that the chunks are sent *sent*, and forget the last pass."""
        self._sent = sent
        self.passages: list[Passage | None] = [None] * len(self._call.chunks)

    def activations(self, chunk: int) -> list[torch.Tensor | None]:
        """Return what `recv_forward` would return for this chunk's first microbatch.

        Args:
            chunk: Index of the model chunk.

        Returns:
            One tensor ``[sequence, microbatch, hidden]`` per received shape, each a leaf that
            requires grad, as P2PCommunicator allocates them; ``[None]`` on the first stage.
            Where lengths vary and nobody has said more, one element stands in until `arriving` has
            seen the batch.

        Raises:
            UnsupportedSetup: The user's own do not fit what is sent.
        """
        call, self._guessing = self._call, False
        if megatron.is_first(call.groups, chunk, len(call.chunks)):
            return [None]
        expected = self._expected(chunk)
        given = None if self._given is None else self._given(call, chunk)
        if given is not None:
            return [*received(given, expected, chunk, self._device)]
        if expected is not None:
            return [self.made_up(shape, getattr(torch, dtype.removeprefix("torch."))) for shape, dtype in expected]
        self._guessing = True
        return [self.made_up(self._whole(chunk, (1, 1, *shape[2:]))) for shape in self._wire()]

    def _wire(self) -> list[megatron.Shape]:
        call = self._call
        return megatron.receive_shapes(call.keywords, call.config, call.groups, call.interleaved)

    def _expected(self, chunk: int) -> Load | None:
        """Return what is known to arrive: always where lengths are fixed, else what was told after a pass."""
        if self._call.config.variable_seq_lengths:
            return self._sent[chunk]
        dtype = str(self._call.config.pipeline_dtype)
        return tuple(Parcel(self._whole(chunk, shape), dtype) for shape in self._wire())

    def _parts(self, chunk: int) -> int:
        last = chunk == len(self._call.chunks) - 1
        return megatron.hidden_states_in(self._call.config, self._call.groups, last_chunk=last)

    def _whole(self, chunk: int, shape: megatron.Shape) -> megatron.Shape:
        """Lengthen a shape by the predictions that arrive behind the model's own hidden states."""
        return (self._parts(chunk) * shape[0], *shape[1:])

    def gradients(self, outputs: list[Any]) -> list[torch.Tensor | None]:
        """Return what `recv_backward` would return: a gradient as large as each output that was sent."""
        return [self.made_up(tuple(output.shape)) if output is not None else None for output in outputs]

    def made_up(self, shape: megatron.Shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Make one random tensor as the P2P code would have received it, of ``pipeline_dtype`` unless told."""
        values = torch.randn(shape, generator=self._generator, device=self._device, dtype=torch.float32)
        return as_received(values.to(self._call.config.pipeline_dtype if dtype is None else dtype))

    @contextmanager
    def arriving(self, chunk: int, inputs: list[torch.Tensor | None]) -> Iterator[None]:
        """Watch what the chunk takes, and give it that once the length is known, where it is to be guessed.

        With ``variable_seq_lengths`` no shape says how long the first microbatch is; what
        ``forward_step_func`` hands to the model does. A forward pre-hook on the module that owns
        ``set_input_tensor``, and a wrapper around the model's ``build_schedule_plan``, see it before
        the model reads its input's length, and put the made-up activation both there and into
        *inputs*, from which the backward step takes it.
        """
        owner = megatron.owner_of_input(self._call.chunks[chunk])
        try:
            if self._guessing and owner is not None:
                with self._bound_late(chunk, inputs, owner):
                    yield
            else:
                yield
        finally:
            self.passages[chunk] = Passage(load_of(inputs), None, self._parts(chunk))

    def put_out(self, chunk: int, outputs: list[Any]) -> None:
        """Note what the chunk's forward step put out."""
        passage = self.passages[chunk]
        assert passage is not None
        self.passages[chunk] = passage._replace(gave=load_of(outputs))

    @contextmanager
    def _bound_late(self, chunk: int, inputs: list[torch.Tensor | None], owner: torch.nn.Module) -> Iterator[None]:
        wire = self._wire()

        def bind(module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            call = self._call
            shapes = megatron.arriving_shapes(wire, call.keywords, call.config, call.groups, positional, named)
            inputs[:] = [self.made_up(self._whole(chunk, shape)) for shape in shapes]
            module.set_input_tensor(list(inputs))

        hook = owner.register_forward_pre_hook(bind, with_kwargs=True)
        try:
            with _planning(megatron.unwrapped(self._call.chunks[chunk]), bind):
                yield
        finally:
            hook.remove()


def as_received(values: torch.Tensor) -> torch.Tensor:
    """Return a leaf that requires grad, as P2PCommunicator allocates what it receives."""
    return values.detach().requires_grad_(values.is_floating_point())


def load_of(tensors: Iterable[Any]) -> Load:
    """Describe the tensors among *tensors*, those in lists included."""
    flat = [one for each in tensors for one in (each if isinstance(each, (list, tuple)) else [each])]
    return tuple(Parcel.of(tensor) for tensor in flat if isinstance(tensor, torch.Tensor))


def received(given: Any, expected: Load | None, chunk: int, device: torch.device) -> list[torch.Tensor]:
    """Return the user's own activations as the P2P code would have received them.

    Args:
        given: What ``activations`` returned: a tensor or a list of them.
        expected: What arrives there; None where nobody knows yet.
        chunk: The chunk's index, for the error.
        device: Where it has to be.

    Raises:
        UnsupportedSetup: It is no tensor, or of another shape or dtype.
    """
    tensors = list(given) if isinstance(given, (list, tuple)) else [given]
    load = load_of(tensors)
    if len(load) == len(tensors) and expected in (None, load):
        return [as_received(tensor.detach().clone().to(device)) for tensor in tensors]
    wanted = "tensors" if expected is None else _told(expected)
    raise UnsupportedSetup(
        f"activations= made something else for chunk {chunk} than the stage before it sends.",
        found=f"{_told(load) or type(given).__name__}; expected {wanted}.",
        matters="What is compiled for another shape or dtype is compiled again in the real step, or fails.",
        do="Make what that stage's forward step returns, or return None to have random numbers made.",
    )


def _told(load: Load) -> str:
    return ", ".join(f"{parcel.dtype} {parcel.shape}" for parcel in load)


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
