"""When each forward and backward of a rank ran, read off Megatron's own step functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pp_free_warmup import in_warmup
from pp_free_warmup._cli._records import Span, clock
from pp_free_warmup._undo import swapped

Told = Callable[[str], object]


class Timeline:
    """Note every forward and backward that Megatron's schedule, or the warmup, runs on this rank.

    Args:
        chunks: The rank's model chunks, as passed to the schedule.
        told: Called with what the rank does now, for those who watch.
    """

    def __init__(self, chunks: list[Any], told: Told) -> None:
        self.spans: list[Span] = []
        self._chunks = chunks
        self._told = told
        self._seen: set[tuple[str, int, bool]] = set()
        self._made_by: dict[int, int] = {}

    def until(self, moment: float) -> list[Span]:
        """Return what ended before *moment*."""
        return [span for span in self.spans if span.ended <= moment]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time `forward_step` and `backward_step` of ``megatron.core.pipeline_parallel.schedules`` (0.14 to 0.19)."""
        from megatron.core.pipeline_parallel import schedules

        forward, backward = schedules.forward_step, schedules.backward_step
        with (
            swapped(schedules, "forward_step", self._timed_forward(forward)),
            swapped(schedules, "backward_step", self._timed_backward(backward)),
        ):
            yield

    def _timed_forward(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward_step)  # keeps the signature, which tells the releases apart
        def timed(function: Any, iterator: Any, model: Any, *arguments: Any, **keywords: Any) -> Any:
            chunk = next(index for index, mine in enumerate(self._chunks) if mine is model)
            with self._measured("forward", chunk):
                output, tokens = forward_step(function, iterator, model, *arguments, **keywords)
            self._made_by[id(_tensor(output))] = chunk
            return output, tokens

        return timed

    def _timed_backward(self, backward_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward_step)
        def timed(input_tensor: Any, output_tensor: Any, *arguments: Any, **keywords: Any) -> Any:
            chunk = self._made_by.pop(id(_tensor(output_tensor)), 0)
            with self._measured("backward", chunk):
                return backward_step(input_tensor, output_tensor, *arguments, **keywords)

        return timed

    @contextmanager
    def _measured(self, use: str, chunk: int) -> Iterator[None]:
        seen = (use, chunk, torch.is_grad_enabled())  # without gradients, other kernels are compiled
        first = seen not in self._seen
        self._seen.add(seen)
        if first:
            _synchronize()  # what the device still waits for, a neighbour's tensor, is none of its cost
            self._told(f"first {use}{f' of chunk {chunk}' if len(self._chunks) > 1 else ''}")
        began = clock()
        yield
        _synchronize()
        self.spans.append(Span(use, chunk, began, clock(), first, in_warmup()))
        if first:
            self._told("waits")


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _tensor(output: Any) -> Any:
    """Return the tensor that a chunk made; the schedules hold it alone or in a list of one."""
    return output[0] if isinstance(output, list) else output
