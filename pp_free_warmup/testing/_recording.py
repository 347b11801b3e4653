"""Watch one training step: activations as they pass, gradients before and state after the optimizer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._digest import tensor_digest
from pp_free_warmup._ledger import in_warmup
from pp_free_warmup._state_walk import Fields, StateWalk
from pp_free_warmup._trace import observed, random_states

IDENTITY = re.compile(r" ?\w+ object 0x[0-9a-f]+")
HOOK = re.compile(r"(_hooks\w*)\[\d+\]")
GROUP = re.compile(r"group=\d{6,}")  # Transformer Engine's keys name a process group by its address


class Activations:
    """One running hash per module of everything that its forward returned, microbatch by microbatch.

    What the warmup's own pass computes is left out.

    Args:
        kinds: Watch only modules whose class name ends with this.
    """

    def __init__(self, kinds: str = "") -> None:
        self._kinds = kinds
        self._hashes: dict[str, Any] = {}

    @contextmanager
    def watched(self, chunks: list[Any]) -> Iterator[None]:
        """Hook into every module of *chunks* for the block."""
        hooks = [
            module.register_forward_hook(self._hook(f"chunk{number}.{name}"))
            for number, chunk in enumerate(chunks)
            for name, module in chunk.named_modules()
            if type(module).__name__.endswith(self._kinds)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def taken(self) -> Fields:
        """Return the hashes since the last call, and begin anew."""
        fields = {f"activation.{name}": each.hexdigest() for name, each in self._hashes.items()}
        self._hashes.clear()
        return fields

    def _hook(self, name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            if not in_warmup():
                running = self._hashes.setdefault(name, hashlib.blake2b(digest_size=8))
                for tensor in _tensors(output):
                    running.update(tensor_digest(tensor).encode())

        return hook


def loss_fields(losses: list[Any]) -> Fields:
    """Return what the schedule returned, one field per microbatch and name."""
    fields = {}
    for number, loss in enumerate(losses):
        named = loss if isinstance(loss, dict) else {"output": loss}
        for name, value in named.items():
            fields[f"loss[{number}].{name}"] = tensor_digest(value) if torch.is_tensor(value) else repr(value)
    return fields


def gradient_fields(chunks: list[Any]) -> Fields:
    """Return every parameter's ``main_grad`` and ``grad``."""
    fields = {}
    for name, parameter in _parameters(chunks):
        for kind in ("main_grad", "grad"):
            value = getattr(parameter, kind, None)
            if value is not None:
                fields[f"{kind}.{name}"] = tensor_digest(value)
    return fields


def model_fields(chunks: list[Any]) -> Fields:
    """Return parameters and buffers, those that are not saved included."""
    fields = {f"parameter.{name}": tensor_digest(parameter) for name, parameter in _parameters(chunks)}
    for number, chunk in enumerate(chunks):
        fields |= {f"buffer.chunk{number}.{name}": tensor_digest(value) for name, value in chunk.named_buffers()}
    return fields


def global_fields() -> Fields:
    """Return random states, Megatron's tracker's included, and what layers left for the log."""
    from megatron.core.tensor_parallel import random

    walk = StateWalk()
    walk.visit("tracker", random._CUDA_RNG_STATE_TRACKER)
    for slot in megatron.loss_trackers():
        walk.visit(f"log.{slot.owner.__name__}.{slot.name}", vars(slot.owner)[slot.name])
    return random_states() | without_identity(walk.fields)


def whole_fields(chunks: list[Any], optimizer: Any) -> Fields:
    """Return everything that `assert_leaves_no_trace` compares, without object identities."""
    fields = without_identity(observed(chunks, optimizer).fields)
    return {f"state.{path}": text for path, text in fields.items()}


def without_identity(fields: Fields) -> Fields:
    """Return *fields* without object addresses and hook numbers, which differ from run to run."""
    kept: Fields = {}
    for path, text in fields.items():
        name = GROUP.sub("group=*", HOOK.sub(r"\1[*]", path))
        kept[name] = kept.get(name, "") + IDENTITY.sub("", text)
    return kept


def _parameters(chunks: list[Any]) -> Iterator[tuple[str, Any]]:
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            yield f"chunk{number}.{name}", parameter


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(output):
        yield output
    elif isinstance(output, (list, tuple)):
        for each in output:
            yield from _tensors(each)
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
