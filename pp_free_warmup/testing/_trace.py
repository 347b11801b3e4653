"""Prove that a block of code left a model, and everything around it, as it was."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import torch

from pp_free_warmup.testing._digest import bytes_digest, pickle_digest
from pp_free_warmup.testing._state_walk import OPENED, Fields, StateWalk

__all__ = ["BENIGN", "assert_leaves_no_trace", "changes", "observed"]

# Paths that a forward and backward may change without a trace in training, and why.
BENIGN = (
    # Pairs with the parameters that were really gathered; a flag put back would gather them again.
    "*.param_gather_handle",
    "*.param_gather_dispatched",
    # Scratch that every forward overwrites before it reads it.
    "*.token_dispatcher.*",
    "*.token_dispatcher",
    "*_checkpoint",
    "*_checkpoint.*",
    "*.input_jitter*",
    # Filled once with values that do not depend on the batch.
    "megatron.core.parallel_state:_GLOBAL_MEMORY_BUFFER*",
    "*.rotary_pos_emb_cache*",
    "megatron.core.tensor_parallel.random:_share_storage_ext",
)


@contextmanager
def assert_leaves_no_trace(model: Any = None, optimizer: Any = None, *, ignoring: Iterable[str] = ()) -> Iterator[None]:
    """Assert that the block changes nothing that later training could see, field by field.

    Compared, to the bit and by object identity: parameters, gradients, ``main_grad``, buffers
    (those that are not saved too), every plain field and hook of every module, the
    data-parallel wrapper's buckets, configs, optimizer state, the random states of Python,
    NumPy, torch, CUDA and Megatron's tracker, and the module globals and class attributes of all
    loaded ``megatron`` and ``transformer_engine`` modules, where loss trackers live.

    If the block raises, nothing is compared.

    Args:
        model: A model chunk or a list of them, wrapped or not; None: globals and random states only.
        optimizer: An optimizer whose state is compared too.
        ignoring: More patterns (``fnmatch``) of paths that may change, beside `BENIGN`.

    Raises:
        AssertionError: Something changed; the text lists every path, before and after.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> with assert_leaves_no_trace(model):
        ...     model(torch.ones(1, 2))
        tensor(...)
    """
    before = observed(model, optimizer)
    yield
    changed = changes(before.fields, observed(model, optimizer).fields, ignoring)
    if changed:
        raise AssertionError(f"The block left a trace in {len(changed)} places:\n" + "\n".join(changed))


def observed(model: Any = None, optimizer: Any = None) -> StateWalk:
    """Write down the whole state that `assert_leaves_no_trace` compares."""
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    homes = {type(part).__module__ for chunk in chunks if chunk is not None for part in chunk.modules()}
    walk = StateWalk(opened=homes)
    for number, chunk in enumerate(chunks):
        walk.visit(f"chunk{number}", chunk)
    walk.visit("optimizer", optimizer)
    if isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "__dict__"):
        walk.attributes("optimizer", vars(optimizer))
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] in OPENED[:2] and isinstance(module, ModuleType):
            _visit_globals(walk, module)
    walk.fields.update(random_states())
    return walk


def changes(before: Fields, after: Fields, ignoring: Iterable[str] = ()) -> list[str]:
    """Return one line per path that differs, the ignored ones left out.

    A module that was not loaded before counts as no change.
    """
    ignored = (*BENIGN, *ignoring)
    loaded = {path.partition(":")[0] for path in before if ":" in path}
    lines = []
    for path in sorted({*before, *after}):
        old, new = before.get(path, "absent"), after.get(path, "absent")
        new_module = ":" in path and path.partition(":")[0] not in loaded
        if old != new and not new_module and not any(fnmatchcase(path, pattern) for pattern in ignored):
            lines.append(f"  {path}: {old} -> {new}")
    return lines


def random_states() -> Fields:
    """Digest the random states of Python, NumPy (if imported), torch and every CUDA device in use."""
    states = {
        "random.python": pickle_digest(random.getstate()),
        "random.torch": bytes_digest(torch.get_rng_state().numpy().tobytes()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["random.numpy"] = pickle_digest(numpy.random.get_state())
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            state = torch.cuda.get_rng_state(device)
            states[f"random.cuda{device}"] = bytes_digest(state.cpu().numpy().tobytes())
    return states


def _visit_globals(walk: StateWalk, module: ModuleType) -> None:
    """Visit the data in a module's globals and in the class attributes of the classes it defines."""
    walk.fields[f"{module.__name__}:"] = "loaded"
    for name, value in list(vars(module).items()):
        if name.startswith("__"):
            continue
        if isinstance(value, type):
            if value.__module__ == module.__name__:
                _visit_class(walk, f"{module.__name__}:{name}", value)
        elif not callable(value) and not isinstance(value, ModuleType):
            walk.visit(f"{module.__name__}:{name}", value)


def _visit_class(walk: StateWalk, path: str, owner: type) -> None:
    """Visit a class's data attributes: Megatron keeps several trackers there."""
    for name, value in list(vars(owner).items()):
        descriptor = hasattr(type(value), "__get__") or hasattr(value, "__wrapped__")
        if not (name.startswith(("__", "_abc_")) or descriptor or isinstance(value, type)):
            walk.visit(f"{path}.{name}", value)
