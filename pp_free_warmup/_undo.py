"""The save-and-put-back mechanics: lend an attribute, keep tensors, give a container its contents back.

Absent is a state: what was not there before is deleted again afterwards. A
value is read and written where it lives (``vars(owner)``), never where it is
inherited from, so an inherited attribute comes back as an inherited one.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]

ABSENT = object()


@contextmanager
def swapped(owner: object, name: str, value: T) -> Iterator[T]:
    """Bind ``owner.name`` to *value* for the block, then put back what was there, or nothing.

    Args:
        owner: An instance, class or module. Not one that keeps *name* in ``__slots__``.
        name: The attribute. Not a property, and not a registered parameter, buffer or submodule:
            those live elsewhere than in ``vars(owner)``.
        value: What the attribute is during the block.

    Yields:
        *value* itself.

    Raises:
        TypeError: *name* does not live in ``vars(owner)``; nothing was changed.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(timers="real")
        >>> with swapped(config, "timers", None):
        ...     config.timers is None
        True
        >>> config.timers
        'real'
    """
    _refuse_what_lives_elsewhere(owner, name)
    before = vars(owner).get(name, ABSENT)
    _bind(owner, name, value)
    try:
        yield value
    finally:
        _bind(owner, name, before)


@contextmanager
def lent(slots: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Do `swapped` for each ``(owner, name, value)``; all are read before the first is lent."""
    with ExitStack() as undo:
        for owner, name, value in list(slots):
            undo.enter_context(swapped(owner, name, value))
        yield


@contextmanager
def attributes_kept(owner: object, names: Iterable[str]) -> Iterator[None]:
    """Keep the listed attributes of *owner* as they are, those that are absent included.

    Raises:
        TypeError: One of them does not live in ``vars(owner)``; nothing was changed.
    """
    with lent((owner, name, getattr(owner, "__dict__", {}).get(name, ABSENT)) for name in names):
        yield


def _bind(owner: object, name: str, value: object) -> None:
    """Write where the value lives, past ``__setattr__``: Module's registers, a compiled module's forwards."""
    if isinstance(owner, type):
        if value is not ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)
    elif value is not ABSENT:
        vars(owner)[name] = value
    else:
        vars(owner).pop(name, None)


def _refuse_what_lives_elsewhere(owner: object, name: str) -> None:
    kind = type(owner).__name__
    if isinstance(owner, type):
        return
    if not hasattr(owner, "__dict__"):
        raise TypeError(f"{kind}.{name} lives in __slots__; undoing it needs an owner with __dict__")
    if any(hasattr(vars(base).get(name), "__set__") for base in type(owner).__mro__):
        raise TypeError(f"{kind}.{name} is a property or a slot; undoing it needs a plain attribute")
    registries = ("_parameters", "_buffers", "_modules") if isinstance(owner, torch.nn.Module) else ()
    registered = [registry for registry in registries if name in vars(owner).get(registry, {})]
    if registered:
        raise TypeError(f"{kind}.{name} is registered in {registered[0]}; replacing it would unregister it")


@contextmanager
def tensors_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Copy the values of *tensors* and write them back in place, into the same storage.

    A tensor whose ``.data`` was re-assigned during the block, with another dtype or shape even,
    gets its old storage back first. Version counters do not rise, so a graph that the caller
    recorded before stays valid. Inference tensors, leaves that require grad and tensors that
    overlap themselves (expanded ones) are written too; memory of the host only where its bits
    differ, since it may be read-only. A tensor without memory (meta, freed) is passed over.
    Costs one copy of the tensors for the length of the block.
    """
    kept = [_Values(tensor) for tensor in tensors if _has_memory(tensor)]
    try:
        yield
    finally:
        with ExitStack() as undo:
            for one in kept:
                undo.callback(one.write_back)


class _Values:
    """One tensor's values, and where they lie."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._lies_plainly = _lies_plainly(tensor)
        self._place = tensor.data if self._lies_plainly else tensor
        self._size = self._place.untyped_storage().nbytes() if self._lies_plainly else 0
        with torch.inference_mode():
            self._values = self._written().clone()

    def write_back(self) -> None:
        """Write the values where they were."""
        if self._lies_plainly:
            if self._place.untyped_storage().nbytes() != self._size:  # freed in the block: writing would crash
                self._place.untyped_storage().resize_(self._size)
            if _placement(self._tensor.data) != _placement(self._place):
                self._tensor.data = self._place
        with torch.inference_mode():
            now = self._written()
            if now.device.type != "cpu" or not self._lies_plainly or not _same_bits(now, self._values):
                now.copy_(self._values)

    def _written(self) -> torch.Tensor:
        """Return the tensor, or all bytes between its first and its last where it overlaps itself."""
        tensor = self._place
        if not self._lies_plainly or not torch._debug_has_internal_overlap(tensor):
            return tensor
        reach = 1 + sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
        start, size = tensor.storage_offset(), tensor.element_size()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return whole.set_(tensor.untyped_storage(), start * size, (reach * size,), (1,))


def _lies_plainly(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor is a strided one whose memory is its storage's (not sparse, nested or a wrapper)."""
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.data_ptr() != 0


def _has_memory(tensor: torch.Tensor) -> bool:
    """Tell whether there is something to copy: not where the tensor is meta, empty or freed."""
    if tensor.is_meta or not tensor.numel():
        return False
    return tensor.layout is not torch.strided or tensor.is_nested or tensor.data.untyped_storage().nbytes() > 0


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = (each.reshape(-1).contiguous().view(torch.uint8) for each in (one, other))
    return torch.equal(*flat)


def _placement(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()


@contextmanager
def emptied(container: Container) -> Iterator[None]:
    """Lend *container* empty, for one that is known under several names; then put its contents back."""
    before = container.copy()
    container.clear()
    try:
        yield
    finally:
        refill(container, before)


def refill(container: Container, before: Any) -> None:
    """Give a container the very objects that *before* holds, in their order; write only what differs.

    Items are compared by identity alone. A thread that reads meanwhile never finds the container
    empty: every item that is in both is there all the time, but for a dict whose order has to be
    mended, where one entry at a time is missing.

    Args:
        container: A dict, list, set or deque, or of a class derived from one; its own methods are not asked.
        before: A copy made earlier.
    """
    if isinstance(container, dict):
        _refill_dict(container, before)
    elif isinstance(container, set):
        set.update(container, before)
        set.intersection_update(container, before)
    elif not _is_same(container, before):
        if isinstance(container, list):
            list.__setitem__(container, slice(None), before)
        else:
            deque.extend(container, before)
            while len(container) > len(before):
                deque.popleft(container)


def _refill_dict(container: dict[Any, Any], before: dict[Any, Any]) -> None:
    kind = OrderedDict if isinstance(container, OrderedDict) else dict
    if is_same_dict(container, before):
        return
    for key, value in dict.items(before):
        if dict.get(container, key, ABSENT) is not value:
            kind.__setitem__(container, key, value)
    for key in [key for key in container if key not in before]:
        kind.pop(container, key)
    _reorder(container, before, kind)


def _reorder(container: dict[Any, Any], before: dict[Any, Any], kind: type[dict[Any, Any]]) -> None:
    if not _is_same(container, before):
        for key in before:
            kind.__setitem__(container, key, kind.pop(container, key))


def is_same_dict(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Tell whether two dicts hold the very same keys and values in the same order."""
    return (
        len(one) == len(other)
        and all(map(operator.is_, dict.values(one), dict.values(other)))
        and all(map(operator.is_, one, other))
    )


def _is_same(items: Collection[Any], others: Collection[Any]) -> bool:
    return len(items) == len(others) and all(map(operator.is_, items, others))
