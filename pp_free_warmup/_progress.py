"""What an iterator keeps about itself: read it, put it back, and make one fetch's change again.

The pass fetches a batch that the real schedule is served later. What the fetch wrote
into the iterator's own fields (a position, a log, a private generator) belongs to the
real step, at the moment when the batch is served; what else the pass wrote belongs to
nobody. What the iterator merely wraps (a generator, an inner loader) has advanced for good.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pp_free_warmup._structure import structure_kept
from pp_free_warmup._undo import ABSENT

DATA = 100_000  # a container of more entries holds data, not a position
SMALL = 4096  # a tensor of no more elements, in a field of the iterator, may be a counter
DEPTH = 4  # how far below the iterator a private generator or a thread is looked for
SCALARS = (bool, int, float, complex, str, bytes)
OTHERS = ("threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio", "socket", "subprocess")


@contextmanager
def own_state_kept(iterator: Any) -> Iterator[None]:
    """Keep the fields of an iterator that runs itself, what its containers hold, and its private generators."""
    before = Progress(iterator)
    with structure_kept(iterator):
        try:
            yield
        finally:
            before.put_back()


def is_written_by_others(iterator: Any) -> bool:
    """Tell whether a thread or process may write to the iterator's fields at any time: those are left alone.

    A prefetcher's buffer that is put back would lose what its thread has filled in since.
    """
    return any(
        base.__module__.split(".")[0] in OTHERS for value in _below(iterator) for base in type(value).__mro__[:-1]
    )


class Progress:
    """The fields of an iterator at one moment, what its containers hold, its generators and small tensors.

    Args:
        iterator: Any object. One without fields, such as a generator, has no progress that can be seen.
    """

    def __init__(self, iterator: Any) -> None:
        self._owner = iterator
        self._fields = _fields(iterator)
        found = _containers([iterator, *self._fields.values()])
        self._contents = {id(container): (container, _contents(container)) for container in found}
        self._states = {id(value): (value, read(value), write) for value, read, write in _stateful(iterator)}

    def put_back(self) -> None:
        """Make the iterator again what it was: the same objects, with the same contents."""
        for name, value in _fields(self._owner).items():
            if name not in self._fields:
                _set(self._owner, name, ABSENT)
            elif self._fields[name] is not value:
                _set(self._owner, name, self._fields[name])
        for name in self._fields.keys() - _fields(self._owner).keys():
            _set(self._owner, name, self._fields[name])
        for container, contents in self._contents.values():
            if not _alike(_contents(container), contents):
                _refill(container, contents)
        for value, state, write in self._states.values():
            write(value, state)

    def advance_to(self, after: Progress) -> None:
        """Change the iterator again as it changed from here to *after*, where it is now as it was here.

        What differs from here by now was changed by somebody else, who knows better.
        """
        now = Progress(self._owner)
        for name in {**self._fields, **after._fields}:
            here, there = self._fields.get(name, ABSENT), after._fields.get(name, ABSENT)
            if here is not there and _same(now._fields.get(name, ABSENT), here):
                _set(self._owner, name, there)
        for key, (container, contents) in after._contents.items():
            here = self._contents.get(key, (None, None))[1]
            if here is None or (not _alike(here, contents) and _alike(_contents(container), here)):
                _refill(container, contents)
        for key, (value, state, write) in after._states.items():
            here = self._states.get(key, (None, ABSENT))[1]
            if here is ABSENT or _equal(now._states.get(key, (None, ABSENT))[1], here):
                write(value, state)


def _fields(owner: Any) -> dict[str, Any]:
    try:
        found = dict(vars(owner))
    except TypeError:
        found = {}
    for base in type(owner).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = vars(base).get(_mangled(base, name))
            if type(member).__name__ == "member_descriptor" and hasattr(owner, _mangled(base, name)):
                found[_mangled(base, name)] = getattr(owner, _mangled(base, name))
    return found


def _mangled(base: type, name: str) -> str:
    hidden = name.startswith("__") and not name.endswith("__")
    return f"_{base.__name__.lstrip('_')}{name}" if hidden else name


def _set(owner: Any, name: str, value: Any) -> None:
    """Write where the value lives, past a ``__setattr__`` of the class."""
    if value is ABSENT:
        object.__delattr__(owner, name)
    else:
        object.__setattr__(owner, name, value)


def _containers(roots: Iterable[Any]) -> list[Any]:
    found: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if isinstance(value, (dict, list, set, deque)) and id(value) not in found and len(value) <= DATA:
            found[id(value)] = value
            waiting.extend(value.values() if isinstance(value, dict) else value)
    return list(found.values())


def _contents(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(contents)
    else:
        container.extend(contents)


def _alike(one: Any, other: Any) -> bool:
    """Tell whether two contents hold the same things in the same order."""
    if isinstance(one, set):
        return bool(one == other)
    if isinstance(one, dict):
        return _alike(list(one), list(other)) and _alike(list(one.values()), list(other.values()))
    return len(one) == len(other) and all(map(_same, one, other))


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, SCALARS) and one == other)


def _equal(one: Any, other: Any) -> bool:
    """Compare two states of a generator, whatever they are made of."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    equal = one == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def _below(iterator: Any) -> Iterator[Any]:
    """Iterate over the iterator and what it holds, a few levels deep; modules and large containers are data."""
    seen: set[int] = set()
    level = [iterator]
    for _ in range(DEPTH):
        parts = []
        for value in level:
            if id(value) not in seen:
                seen.add(id(value))
                yield value
                parts += _parts(value)
        level = parts


def _parts(value: Any) -> list[Any]:
    if isinstance(value, (torch.nn.Module, torch.Tensor, type)) or callable(value):
        return []
    if isinstance(value, (dict, list, tuple, set, deque)) and len(value) > DATA:
        return []
    held = list(value.values()) if isinstance(value, dict) else []
    if isinstance(value, (list, tuple, set, deque)):
        held = list(value)
    return held + list(_fields(value).values())


Read = Callable[[Any], Any]
Write = Callable[[Any, Any], None]


def _stateful(iterator: Any) -> Iterator[tuple[Any, Read, Write]]:
    """Find the private generators below the iterator, and the small tensors in its fields."""
    for value in _below(iterator):
        yield from _as_generator(value)
    for value in _fields(iterator).values():
        if type(value) is torch.Tensor and value.layout is torch.strided and value.numel() <= SMALL:
            yield value, lambda tensor: tensor.detach().clone(), lambda tensor, kept: tensor.data.copy_(kept)


def _as_generator(value: Any) -> Iterator[tuple[Any, Read, Write]]:
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        yield value, lambda one: one.get_state(), lambda one, state: one.set_state(state)
    elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        yield value, lambda one: one.getstate(), lambda one, state: one.setstate(state)
    elif numpy is not None and isinstance(value, numpy.random.Generator):
        yield value, lambda one: one.bit_generator.state, _set_numpy
    elif numpy is not None and isinstance(value, numpy.random.RandomState):
        yield value, lambda one: one.get_state(legacy=False), lambda one, state: one.set_state(state)


def _set_numpy(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state
