"""What is there to be compared: exact digests of a training's state, on one rank."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import in_warmup
from pp_free_warmup.testing import models

# Everything is compared after these steps and after the last one; losses and gradient norms after every one.
CLOSELY = (0, 1, 2, 5, 6)


def digest(value: object) -> str:
    """Return a short hash of a tensor's bytes, of bytes, or of anything's repr."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        told = f"{value.dtype} {tuple(value.shape)} ".encode()
        value = told + flat.view(torch.uint8).cpu().numpy().tobytes()
    elif not isinstance(value, bytes):
        value = repr(value).encode()
    return hashlib.blake2b(value, digest_size=8).hexdigest()


class Recorder:
    """Collects ``name -> digest`` in the order in which things happen.

    Args:
        training: What is trained.
        steps: How many steps it will be.
    """

    def __init__(self, training: models.Training, steps: int) -> None:
        self.training = training
        self.kept: dict[str, str] = {}
        self.losses: list[float] = []
        self._close = {*CLOSELY, steps - 1}
        self._step = -1
        self._calls = 0

    @property
    def closely(self) -> bool:
        """Whether everything is compared in this step."""
        return self._step in self._close

    def begin(self, step: int) -> None:
        """Count the calls of layers anew."""
        self._step, self._calls = step, 0

    def note(self, name: str, value: object) -> None:
        """Keep the digest of *value* under the current step."""
        self.kept[f"step {self._step:2d} {name}"] = digest(value)

    def hook_layers(self) -> None:
        """Keep what every transformer layer, embedding and output layer puts out."""
        for number, chunk in enumerate(self.training.chunks):
            for name, module in chunk.named_modules():
                if type(module).__name__ == "TransformerLayer" or name.endswith(("embedding", "output_layer")):
                    module.register_forward_hook(partial(self._activation, f"{number} {name}"))

    def _activation(self, name: str, _module: Any, _inputs: Any, output: Any) -> None:
        """Keep one output, unless this is the warmup's own pass."""
        if in_warmup() or not self.closely:
            return
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor):
            self.note(f"activation {self._calls:3d} of {name}", first)
        self._calls += 1

    def returned(self, what: str, losses: Any) -> None:
        """Keep what the schedule returned."""
        self.note(what, _plain(losses))
        for entry in losses or []:
            for value in entry.values() if isinstance(entry, dict) else ():
                self.losses.append(float(value.flatten()[0]))

    def gradients(self) -> None:
        """Keep every ``main_grad``, before the optimizer works on it."""
        for number, chunk in enumerate(self.training.chunks):
            for name, parameter in chunk.named_parameters():
                if parameter.requires_grad:
                    self.note(f"gradient {number} {name}", parameter.main_grad)

    def state(self) -> None:
        """Keep parameters, buffers, FP8 scales and histories, random states and what is logged."""
        for number, chunk in enumerate(self.training.chunks):
            for name, parameter in chunk.named_parameters():
                self.note(f"parameter {number} {name}", parameter)
            for name, buffer in megatron.unwrapped(chunk).named_buffers():
                self.note(f"buffer {number} {name}", buffer)
            for name, module in chunk.named_modules():
                for key, value in _fp8_values(module):
                    self.note(f"fp8 {number} {name} {key}", value)
        for name, state in random_states():
            self.note(f"random {name}", state)
        for owner, name, _ in megatron.loss_trackers():
            self.note(f"logged {name}", _plain(getattr(owner, name)))


def _fp8_values(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    meta = vars(module).get("fp8_meta") or {}
    for key in ("scaling_fwd", "scaling_bwd"):
        for name in ("scale", "amax_history"):
            value = getattr(meta.get(key), name, None)
            if isinstance(value, torch.Tensor):
                yield f"{key} {name}", value


def random_states() -> Iterator[tuple[str, object]]:
    """Yield the state of every random number generator that a training can draw from."""
    from megatron.core.tensor_parallel import random as megatron_random

    yield "python", random.getstate()
    if "numpy" in sys.modules:
        yield "numpy", sys.modules["numpy"].random.get_state(legacy=True)[1].tobytes()
    yield "cpu", torch.get_rng_state()
    yield "cuda", torch.cuda.get_rng_state()
    states = getattr(megatron_random._CUDA_RNG_STATE_TRACKER, "states_", {})
    for name, state in states.items():
        yield f"tracker {name}", state.get_state() if isinstance(state, torch.Generator) else state


def _plain(value: Any, depth: int = 6) -> Any:
    """Turn nested containers and objects into lists and strings, and tensors into digests."""
    if isinstance(value, torch.Tensor):
        return digest(value)
    if isinstance(value, dict):
        return [(str(key), _plain(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth - 1) for item in value]
    if isinstance(value, (str, int, float, type(None))):
        return repr(value)
    inside = not isinstance(value, (type, torch.distributed.ProcessGroup)) and hasattr(value, "__dict__")
    return _plain(vars(value), depth - 1) if inside and depth > 0 else type(value).__name__
