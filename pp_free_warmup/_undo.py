"""The only save-and-put-back mechanics: lend an attribute, keep tensors, keep contents.

Absent is a state: what was not there before is deleted again afterwards. A
value is read and written where it lives (``vars(owner)``), never where it is
inherited from, so an inherited attribute comes back as an inherited one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
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
    recorded before stays valid. Costs one copy of the tensors for the length of the block.
    """
    kept = [(tensor, tensor.data, tensor.data.clone()) for tensor in tensors]
    sizes = [storage.untyped_storage().nbytes() for _, storage, _ in kept]
    try:
        yield
    finally:
        with ExitStack() as undo:
            for (tensor, storage, values), size in zip(kept, sizes, strict=True):
                undo.callback(_write_back, tensor, storage, values, size)


def _write_back(tensor: torch.Tensor, storage: torch.Tensor, values: torch.Tensor, size: int) -> None:
    if storage.untyped_storage().nbytes() != size:  # freed in the block; writing there would crash the process
        storage.untyped_storage().resize_(size)
    if _placement(tensor.data) != _placement(storage):
        tensor.data = storage
    storage.copy_(values)


def _placement(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()


@contextmanager
def mapping_kept(mapping: dict[K, V]) -> Iterator[None]:
    """Keep which keys *mapping* has, in which order, and the very objects they lead to."""
    before = dict(mapping)
    try:
        yield
    finally:
        mapping.clear()
        mapping.update(before)


@contextmanager
def entries_kept(mappings: Iterable[dict[K, V]], keys: Collection[K]) -> Iterator[None]:
    """Keep the objects that the listed keys lead to in each of *mappings*, those that are absent included."""
    mappings = list(mappings)
    before: dict[K, list[Any]] = {key: [mapping.get(key, ABSENT) for mapping in mappings] for key in keys}
    try:
        yield
    finally:
        for key, values in before.items():
            for mapping, value in zip(mappings, values, strict=True):
                if value is ABSENT:
                    mapping.pop(key, None)
                else:
                    mapping[key] = value


@contextmanager
def contents_kept(*roots: object) -> Iterator[None]:
    """Keep the very objects that lists, sets, dicts and deques hold, in their order, nested ones included.

    The containers stay the same objects. A tensor in one is kept by reference, not by value.

    Args:
        *roots: Where to start; what is no container is passed over.
    """
    containers = _containers(roots)
    before = [container.copy() if container else () for container in containers]  # most of a model's are empty
    try:
        yield
    finally:
        for container, contents in zip(containers, before, strict=True):
            _refill(container, contents)


@contextmanager
def emptied(container: Container) -> Iterator[None]:
    """Lend *container* empty, for one that is known under several names; then put its contents back."""
    before = container.copy()
    container.clear()
    try:
        yield
    finally:
        _refill(container, before)


@contextmanager
def fields_kept(owner: object, apart_from: Collection[str] = ()) -> Iterator[None]:
    """Keep every field of *owner*, and what its containers hold; drop the fields that were added.

    Args:
        owner: An instance with a ``__dict__``, or one with ``__slots__``; not a class.
        apart_from: Fields to leave alone.
    """
    before = {name: value for name, value in _fields(owner).items() if name not in apart_from}
    with contents_kept(*before.values()):
        try:
            yield
        finally:
            after = {name: value for name, value in _fields(owner).items() if name not in apart_from}
            changed = {name: before.get(name, ABSENT) for name in {**before, **after}}
            for name, value in changed.items():
                if after.get(name, ABSENT) is not value:
                    _set_field(owner, name, value)


def _fields(owner: object) -> dict[str, Any]:
    if hasattr(owner, "__dict__"):
        return dict(vars(owner))
    return {name: getattr(owner, name) for name in type(owner).__slots__ if hasattr(owner, name)}  # type: ignore[attr-defined]


def _set_field(owner: object, name: str, value: object) -> None:
    if hasattr(owner, "__dict__"):
        _bind(owner, name, value)
    elif value is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _containers(roots: Iterable[object]) -> list[Container]:
    found: dict[int, Container] = {}
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if isinstance(value, (dict, list, set, deque)) and id(value) not in found:
            found[id(value)] = value
            if value:
                waiting.extend(value.values() if isinstance(value, dict) else value)
    return list(found.values())


def _refill(container: Container, contents: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(contents)
    else:
        container.extend(contents)
