"""A stand-in for compiling: the first forward and the first backward of a model chunk sleep."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pp_free_warmup import _megatron as megatron


@contextmanager
def first_uses_take(seconds: float, chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Let the first forward and the first backward of each chunk take *seconds* longer, once per process.

    The delay in the backward is a hook on the chunk's output, so it happens inside autograd's
    backward of that chunk and not before. No value is changed.
    """
    with ExitStack() as hooked:
        for chunk in chunks:
            handle = megatron.unwrapped(chunk).register_forward_hook(_FirstUse(seconds))
            hooked.callback(handle.remove)
        yield


class _FirstUse:
    """The forward hook of one chunk; what it has slept through is no state of the model."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._to_do = {"forward", "backward"}

    def __call__(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self._sleep("forward")
        if "backward" in self._to_do and output.requires_grad:
            output.register_hook(self._in_backward)

    def _in_backward(self, gradient: torch.Tensor) -> None:
        self._sleep("backward")

    def _sleep(self, use: str) -> None:
        if use in self._to_do:
            self._to_do.remove(use)
            time.sleep(self._seconds)
