"""What a guard's case is made of: a call to guard, what to look at, and what a pass would do to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from torch.utils._python_dispatch import TorchDispatchMode

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import guards
from pp_free_warmup._call import Guard, ScheduleCall
from pp_free_warmup._random import CallerRandom


@dataclass(frozen=True)
class Case:
    """One guard under the laws.

    Attributes:
        guard: The guard.
        build: Makes a call whose state the guard keeps; what must be undone later goes on the stack.
        observe: Returns that state: dicts, lists, tensors, numbers, and `Same` around objects that
            must come back as the very same ones (at least one).
        disturb: Does to the state what a pass may do to it. May be called repeatedly.
        variant: Tells several cases of one guard apart.
    """

    guard: Guard
    build: Callable[[ExitStack], ScheduleCall]
    observe: Callable[[ScheduleCall], Any]
    disturb: Callable[[ScheduleCall], None]
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.guard.__name__}-{self.variant}" if self.variant else self.guard.__name__


def with_fields(guard: Guard) -> Guard:
    """Return a guard inside the rule for fields, for one that keeps what the rule leaves out."""

    @contextmanager
    def both(call: ScheduleCall) -> Iterator[None]:
        with guards.fields(call), guard(call):
            yield

    both.__name__ = guard.__name__
    return both


class Same:
    """An object that is compared by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"<the {type(self.value).__name__} at {id(self.value):#x}>"


def call_of(*chunks: torch.nn.Module, config: Any = None, **keywords: Any) -> ScheduleCall:
    """Make a call with these model chunks; a chunk without a config gets *config* or Megatron's plain one."""
    config = ModelParallelConfig() if config is None else config
    for chunk in chunks:
        if not hasattr(megatron.unwrapped(chunk), "config"):
            megatron.unwrapped(chunk).config = config
    return ScheduleCall(
        keywords={"model": list(chunks), "num_microbatches": 4, "forward_only": False, **keywords},
        chunks=chunks,
        iterators=(None,) * len(chunks),
        config=config,
        groups=None,
        interleaved=len(chunks) > 1,
        random=CallerRandom(),
    )


def seen(case: Case, call: ScheduleCall) -> Any:
    """Return what the case observes, copied, so that later changes do not show in it."""
    return _copied(case.observe(call))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return set(value) if isinstance(value, set | frozenset) else value


def differences(before: Any, after: Any, path: str = "state") -> list[str]:
    """Name every place where two observations differ; tensors are compared to the bit."""
    if isinstance(before, Same) and isinstance(after, Same):
        return [] if before.value is after.value else [f"{path}: {after} is not {before}"]
    if isinstance(before, dict) and isinstance(after, dict):
        found = [] if list(before) == list(after) else [f"{path}: keys {list(after)}, before {list(before)}"]
        pairs = [(f"{path}[{key!r}]", before[key], after[key]) for key in before if key in after]
    elif isinstance(before, list) and isinstance(after, list):
        found = [] if len(before) == len(after) else [f"{path}: {len(after)} items, before {len(before)}"]
        pairs = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(before, after, strict=False))]
    else:
        return [] if _equal(before, after) else [f"{path}: {after!r}, before {before!r}"]
    return [*found, *(place for name, one, two in pairs for place in differences(one, two, name))]


def _equal(before: Any, after: Any) -> bool:
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return type(before) is type(after) and bool(before == after)
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        return False
    return torch.equal(before.reshape(-1).view(torch.uint8), after.reshape(-1).view(torch.uint8))


def identities(observed: Any) -> list[Same]:
    """List the objects of an observation that are compared by identity."""
    if isinstance(observed, Same):
        return [observed]
    items = observed.values() if isinstance(observed, dict) else observed if isinstance(observed, list) else ()
    return [found for item in items for found in identities(item)]


class Communication(TorchDispatchMode):
    """Record every collective and send: in torch they all are operators of these namespaces."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in {"c10d", "_c10d_functional"}:
            self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def alone() -> Iterator[None]:
    """Be the only rank of a gloo world, unless there is a world already."""
    if torch.distributed.is_initialized():
        yield
        return
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
