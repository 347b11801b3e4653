"""What a training step makes, hashed piece by piece: two runs are equal to the bit iff all hashes are."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import in_warmup


class Fingerprints:
    """The hashes of one rank's training, by the name of what was hashed.

    Args:
        chunks: The rank's model chunks, wrapped.

    Attributes:
        taken: Hashes by name, as in ``"step 3, gradient of chunk 0 decoder.layers.1.mlp..."``.
    """

    def __init__(self, chunks: list[Any]) -> None:
        self.taken: dict[str, str] = {}
        self._chunks = [megatron.unwrapped(chunk) for chunk in chunks]
        self._step = 0
        self._uses: Counter[str] = Counter()

    @contextmanager
    def watching_activations(self) -> Iterator[None]:
        """Hash what every layer and every chunk puts out, except in the warmup's pass."""
        with ExitStack() as hooked:
            for index, chunk in enumerate(self._chunks):
                for name, module in chunk.named_modules():
                    if name == "" or type(module).__name__.endswith("Layer"):
                        hook = partial(self._see, f"chunk {index} {name}".rstrip())
                        hooked.callback(module.register_forward_hook(hook).remove)
            yield

    def _see(self, name: str, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if in_warmup():
            return
        self._uses[name] += 1
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor):
                self.take(f"activation of {name}, microbatch {self._uses[name]}", tensor)

    def begin(self, step: int) -> None:
        """Name what follows after *step*, the first one being 1."""
        self._step = step
        self._uses.clear()

    def take(self, name: str, value: torch.Tensor | float) -> None:
        """Hash one tensor or number."""
        tensor = torch.as_tensor(value, dtype=None if isinstance(value, torch.Tensor) else torch.float64)
        self.taken[f"step {self._step}, {name}"] = _hash(tensor)

    def take_losses(self, losses: list[Any]) -> None:
        """Hash what the schedule returned."""
        for number, named in enumerate(losses, start=1):
            for name, value in named.items():
                self.take(f"{name} of microbatch {number}", value)

    def take_gradients(self) -> None:
        """Hash the gradients that Megatron's DDP has gathered."""
        self._take_parameters("gradient", lambda parameter: parameter.main_grad)

    def take_parameters(self) -> None:
        """Hash the parameters."""
        self._take_parameters("parameter", lambda parameter: parameter)

    def _take_parameters(self, kind: str, of: Callable[[Any], torch.Tensor]) -> None:
        for index, chunk in enumerate(self._chunks):
            for name, parameter in chunk.named_parameters():
                self.take(f"{kind} of chunk {index} {name}", of(parameter))


def _hash(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    described = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.blake2b(described + data.numpy().tobytes(), digest_size=16).hexdigest()
