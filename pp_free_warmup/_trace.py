"""Write down everything a warmup could have touched, and name what changed.

The guards put back what this library knows of. This looks without knowing: at every
field of every module, at globals and class attributes, at what an optimizer holds.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import torch

from pp_free_warmup._digest import bytes_digest, pickle_digest
from pp_free_warmup._state_walk import Fields, StateWalk

LIBRARIES = ("megatron", "transformer_engine")
NOT_LOOKED_AT = ("torch", "builtins", "pp_free_warmup")

# Paths that a forward and backward may change without a trace in training, and why.
BENIGN = (
    # Scratch that every forward overwrites before it reads it.
    "*.token_dispatcher.*",
    "*.token_dispatcher",
    "*_checkpoint",
    "*_checkpoint.*",
    "*.input_jitter*",
    # Filled once with values that do not depend on the batch.
    "megatron.core.parallel_state:_GLOBAL_MEMORY_BUFFER*",
    "*.rotary_pos_emb_cache*",
    # Streams that the first combined step makes, and every later one finds.
    "megatron.core.pipeline_parallel.utils:_COM?_STREAM",
    "megatron.core.tensor_parallel.random:_share_storage_ext",
    # What torch.compile notes of code that stays compiled.
    "*._dynamo_*",
)


def observed(model: Any = None, optimizer: Any = None, step: Any = None) -> StateWalk:
    """Write down the whole state that a forward and backward of *model* could change.

    Args:
        model: A model chunk, a list of them, or None.
        optimizer: An optimizer, or None.
        step: A ``forward_step_func``: all it holds is looked at too, and the globals of its file.

    Returns:
        The walk; its ``fields`` say what was where.
    """
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    homes = {type(part).__module__ for chunk in chunks if chunk is not None for part in chunk.modules()}
    homes |= {getattr(_innermost(step), "__module__", "")}
    walk = StateWalk(opened=homes)
    for number, chunk in enumerate(chunks):
        walk.visit(f"chunk{number}", chunk)
    walk.visit("optimizer", optimizer)
    if isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "__dict__"):
        walk.attributes("optimizer", vars(optimizer))
    for name, value in _held_by(step):
        walk.visit(f"forward_step_func {name}", value)
    for name, module in sorted(sys.modules.items()):
        ours = name.split(".")[0] in LIBRARIES or (name in homes and name.split(".")[0] not in NOT_LOOKED_AT)
        if ours and isinstance(module, ModuleType):
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


def _innermost(step: Any) -> Any:
    return _innermost(step.func) if isinstance(step, functools.partial) else step


def _held_by(step: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of what a callable holds: a partial's arguments, a method's object, a closure."""
    while isinstance(step, functools.partial):
        yield from ((f"argument {number}", value) for number, value in enumerate(step.args))
        yield from step.keywords.items()
        step = step.func
    if isinstance(step, types.MethodType):
        yield "self", step.__self__
    elif not isinstance(step, types.FunctionType):
        yield "object", step
    names = getattr(getattr(step, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(step, "__closure__", None) or (), strict=True):
        if cell != types.CellType():  # a name that is not bound yet
            yield f"closure {name}", cell.cell_contents


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
