"""Write down everything a warmup could have touched, and name what changed.

The guards put back what this library knows of. This looks without knowing: at every field of
every module, at what the forward step and the data hold, at the globals and class attributes of
every file that their code is from, at what an optimizer holds, and at the environment.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from types import FunctionType, ModuleType
from typing import Any

import torch

from pp_free_warmup._callables import held_by
from pp_free_warmup._digest import bytes_digest, pickle_digest, tensor_digest
from pp_free_warmup._origins import LIBRARIES
from pp_free_warmup._state_walk import Fields, StateWalk

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
    # This library's own stand-ins for the schedules, for as long as a block is open.
    "megatron.core.pipeline_parallel.schedules:forward_*",
    # What torch.compile notes of code that stays compiled, and by which address it knows a module that it wraps.
    "*._dynamo_*",
    "*._torchdynamo_wrapper_id",
    # A warning that is given once per process: the pass gives it in the real step's stead.
    "megatron.* attribute warned",
)
FILE = re.compile(r"([\w.]+):")


def observed(
    model: Any = None,
    optimizer: Any = None,
    step: Any = None,
    data: Any = None,
    tensor_text: Callable[[torch.Tensor], str] = tensor_digest,
) -> StateWalk:
    """Write down the whole state that a forward and backward of *model* could change.

    Args:
        model: A model chunk, a list of them, or None.
        optimizer: An optimizer, or None.
        step: A ``forward_step_func``: all it holds is looked at too, and the files that it leads to.
        data: Its data iterator, or a list of them.
        tensor_text: What stands for a tensor's values.

    Returns:
        The walk; its ``fields`` say what was where.
    """
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    homes = {type(part).__module__ for chunk in chunks if chunk is not None for part in chunk.modules()}
    walk = StateWalk({*homes, *_packages(step)}, tensor_text)
    for number, chunk in enumerate(chunks):
        walk.visit(f"chunk{number}", chunk)
    walk.visit_holder("optimizer", optimizer)
    walk.visit("forward_step_func", step)
    walk.visit("data_iterator", data)
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] in LIBRARIES and isinstance(module, ModuleType):
            walk.visit_file(name, module)
    _visit_files(walk)
    walk.fields.update({f"environ[{name!r}]": bytes_digest(value) for name, value in os.environb.items()})
    walk.fields.update(random_states())
    return walk


def _packages(step: Any) -> set[str]:
    """Return the packages that the functions behind *step* are from."""
    found, waiting = {}, [step]
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found[id(each)] = each
            behind = (held.value for held in held_by(each) if held.name in ("function", "wrapped"))
            waiting += behind
    functions = (each for each in found.values() if type(each) is FunctionType)
    return {str(function.__globals__.get("__name__")).partition(".")[0] for function in functions}


def _visit_files(walk: StateWalk) -> None:
    """Visit the files that the code met is from, and those that they lead to."""
    visited = 0
    while visited < len(walk.origins.files):
        name = list(walk.origins.files)[visited]
        module = sys.modules.get(name)
        if module is not None:
            walk.visit_file(name, module)
        visited += 1


def changes(before: Fields, after: Fields, ignoring: Iterable[str] = ()) -> list[str]:
    """Return one line per path that differs, the ignored ones left out.

    A module that was not loaded before counts as no change.
    """
    ignored = (*BENIGN, *ignoring)
    loaded = {file for path in before if (file := _file_of(path))}
    lines = []
    for path in sorted({*before, *after}):
        old, new = before.get(path, "absent"), after.get(path, "absent")
        new_module = _file_of(path) not in (None, *loaded)
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


def _file_of(path: str) -> str | None:
    """Return the name of the module that a path begins with; None where it begins elsewhere."""
    file = FILE.match(path)
    return file[1] if file else None
