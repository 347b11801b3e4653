"""Which tensors to copy, which to watch, and what to say where a watched one was written to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch

from pp_free_warmup._call import Guard, ScheduleCall
from pp_free_warmup._undo import tensors_kept
from pp_free_warmup.errors import TraceFound

MEBIBYTE = 2**20
LARGEST_COPY = 16 * MEBIBYTE
ALL_COPIES = 256 * MEBIBYTE
NAMED = 5


def copied_and_watched(call: ScheduleCall) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Choose the buffers to copy, the smallest first; the rest and all parameters are watched.

    Buffers are read from each module's registry: Megatron's DDP shadows `Module.buffers`. One whose
    writes leave no version (an inference tensor) is copied whatever its size.
    """
    registries = (vars(module)["_buffers"] for module in call.reached())
    buffers = {id(one): one for registry in registries for one in registry.values() if one is not None}
    copied, watched, total = [], list[torch.Tensor](call.parameters()), 0
    for buffer in sorted(buffers.values(), key=bytes_of):
        total += bytes_of(buffer)
        if buffer.is_inference() or (bytes_of(buffer) <= LARGEST_COPY and total <= ALL_COPIES):
            copied.append(buffer)
        else:
            watched.append(buffer)
    call.taken["buffers"] = sum(map(bytes_of, copied))
    return copied, watched


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; a jagged one counts its longest row for all."""
    return int(tensor.numel()) * tensor.element_size() if not tensor.is_nested else 0


def versions_of(tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Return each tensor with the number of times that it was written to, as far as it counts that."""
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def refuse_written(call: ScheduleCall, versions: list[tuple[torch.Tensor, int]]) -> None:
    """Raise if one of the tensors was written to since, and no guard has put its value back.

    Raises:
        TraceFound: Names them, and the line that keeps them.
    """
    written = {id(tensor) for tensor, version in versions if tensor._version != version} - call.kept
    if not written:
        return
    names = [name for name, tensor in _named(call) if id(tensor) in written]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    patterns = ", ".join(f'"{name.rpartition(".")[2]}"' for name in names[:NAMED])
    raise TraceFound(
        f"The warmup's pass wrote to {len(names)} parameter(s) or large buffer(s), which it only reads by rights.",
        found=f"rank {rank}: {', '.join(names[:NAMED])}{more}; expected the values as they were before the pass.",
        matters="The real step would start from other values than in a run without the warmup.",
        do=f"Let the warmup keep them: extra_guards=[pp_free_warmup.guards.keep_parameters({patterns})].",
    )


def keep_parameters(*patterns: str) -> Guard:
    """Return a guard that copies parameters and buffers by name, for a model that writes to them in its forward.

    A codebook that follows a moving average, or a step size that is set from the first batch, is
    written to by the warmup's pass as well; this puts its value back. What no pattern names is
    only watched.

    Args:
        *patterns: Names as in ``named_parameters()``, whole or their end, with ``*`` and ``?`` as in `fnmatch`.

    Returns:
        A guard for ``pipeline_warmup(extra_guards=[...])``. On a rank without such a parameter it does nothing.

    Example:
        >>> guard = keep_parameters("codebook", "*.quantizer.step_size")
        >>> guard.__name__
        'keep_parameters'
    """

    @contextmanager
    def keeping(call: ScheduleCall) -> Iterator[None]:
        chosen = {
            id(tensor): tensor
            for name, tensor in _named(call)
            if any(fnmatchcase(name, each) or fnmatchcase(name, f"*.{each}") for each in patterns)
        }
        call.kept.update(chosen)
        with tensors_kept(chosen.values()):
            yield

    keeping.__name__ = "keep_parameters"
    return keeping


def _named(call: ScheduleCall) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and value of every parameter and buffer, those of the chunks under their full names."""
    seen: set[int] = set()
    for number, chunk in enumerate(call.chunks):
        for name, module in chunk.named_modules():
            seen.add(id(module))
            yield from _named_in(f"chunk{number}.{name}".rstrip("."), module)
    for module in call.reached():
        if id(module) not in seen:
            yield from _named_in(type(module).__name__, module)


def _named_in(path: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for registry in (vars(module)["_parameters"], vars(module)["_buffers"]):
        yield from ((f"{path}.{name}", value) for name, value in registry.items() if value is not None)
