"""What a pass can reach: modules, the fields of objects, containers and random generators.

The walk goes by what things are, not by a list of names, so that a field which a later
release of Megatron adds, or a trainer's own class, is found without a change here. It only
looks: no property, ``__getattr__``, ``__eq__`` or iterator of anybody's is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import torch

from pp_free_warmup._callables import Held, held_by
from pp_free_warmup._kinds import (
    CALLABLE,
    LISTED,
    MAPPING,
    MODULE,
    OBJECT,
    RANDOM,
    TUPLE,
    UNKNOWN,
    fields_of,
    is_number,
    is_shared,
    kind_of,
    slots_of,
    slots_read,
)

# How many links are followed from a module or a forward step, and into how large a container.
DEPTH = 6
ITEMS = 10_000


@dataclass(eq=False, slots=True)
class Reached:
    """What one walk found; each thing once, parents before what hangs on them.

    Attributes:
        modules: Modules, those that no parent registers included.
        fields: The ``__dict__`` of modules, of their parameters and of plain objects.
        lasting: Ids of those `fields` in which something new may stay.
        slotted: Objects with ``__slots__``, and the descriptors of those slots.
        containers: Builtin containers (and those of classes derived from them) that can be changed.
        cells: Variables of closures.
        names: Counters and flags that are kept one by one, as the dict and the name: global variables that a
            function names, fields of a forward step's objects that other threads work on.
        generators: Private random generators of torch, NumPy and Python.
    """

    modules: list[torch.nn.Module] = field(default_factory=list)
    fields: list[dict[str, Any]] = field(default_factory=list)
    lasting: set[int] = field(default_factory=set)
    slotted: list[tuple[object, tuple[Any, ...]]] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)
    cells: list[CellType] = field(default_factory=list)
    names: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)


class Walk:
    """A walk from a model, and on from a forward step; what was met before is not entered again.

    Example:
        >>> walk = Walk()
        >>> len(walk.from_model([torch.nn.Sequential(torch.nn.Linear(1, 1))]).modules)
        2
    """

    def __init__(self) -> None:
        self._met: dict[int, Any] = {}
        self._kinds: dict[type, int] = {}
        self._slots: dict[type, tuple[Any, ...]] = {}
        self._waiting: list[tuple[Any, int, int]] = []
        self._found = Reached()
        self._opens = False

    def from_model(self, roots: Iterable[Any]) -> Reached:
        """Walk from modules and configs; functions are left as they are."""
        return self._walk(roots, opens=False)

    def from_step(self, roots: Iterable[Any]) -> Reached:
        """Walk from functions, the objects that they are bound to, and what these hold."""
        return self._walk(roots, opens=True)

    def from_object(self, root: Any) -> Reached:
        """Walk from one object of any class: an iterator too, which is passed over where something holds it."""
        self._kinds[type(root)] = OBJECT
        return self._walk([root], opens=False)

    def _walk(self, roots: Iterable[Any], *, opens: bool) -> Reached:
        self._found, self._opens = Reached(), opens
        self._push(list(roots)[::-1], 0)
        while self._waiting:
            value, kind, depth = self._waiting.pop()
            if id(value) not in self._met:
                self._met[id(value)] = value
                ENTER[kind](self, value, depth)
        return self._found

    def _push(self, values: Iterable[Any], depth: int) -> None:
        kinds, waiting = self._kinds, self._waiting
        for value in values:
            of = type(value)
            kind = kinds.get(of)
            if kind is None:
                kind = kinds[of] = kind_of(of)
            if kind:
                waiting.append((value, kind, depth))

    def _enter_module(self, module: torch.nn.Module, _depth: int) -> None:
        found, fields = self._found, vars(module)
        found.modules.append(module)
        found.fields.append(fields)
        kinds, waiting = self._kinds, self._waiting
        for value in fields.values():  # as `_push` does, with a short way for the dozen of empty dicts of a module
            kind = kinds.get(type(value), UNKNOWN)
            if kind == UNKNOWN:
                self._push((value,), 0)
            elif kind == MAPPING and not value:
                found.containers.append(value)
            elif kind:
                waiting.append((value, kind, 0))
        new = [one for one in fields["_parameters"].values() if one is not None and id(one) not in self._met]
        self._met.update((id(parameter), parameter) for parameter in new)
        found.fields.extend(map(vars, new))

    def _enter_mapping(self, container: dict[Any, Any], depth: int) -> None:
        self._found.containers.append(container)
        if len(container) <= ITEMS and depth < DEPTH:
            self._push(tuple(dict.values(container)), depth + 1)

    def _enter_listed(self, container: Any, depth: int) -> None:
        self._found.containers.append(container)
        self._enter_tuple(container, depth)

    def _enter_tuple(self, items: Any, depth: int) -> None:
        if len(items) <= ITEMS and depth < DEPTH:
            self._push(tuple(items), depth + 1)

    def _enter_random(self, generator: Any, _depth: int) -> None:
        self._found.generators.append(generator)

    def _enter_object(self, value: object, depth: int) -> None:
        fields, slots = fields_of(value), self._slots_of(type(value))
        if self._opens and is_shared(value):
            self._found.names.extend((fields or {}, name) for name, held in (fields or {}).items() if is_number(held))
            return
        if fields is not None:
            self._found.fields.append(fields)
            self._found.lasting.update([id(fields)] if self._opens else [])
        if slots:
            self._found.slotted.append((value, slots))
        if depth < DEPTH:
            self._push((*(fields or {}).values(), *slots_read(value, slots).values()), depth + 1)
            self._enter_callable(value, depth)

    def _enter_callable(self, function: Any, depth: int) -> None:
        if not self._opens or depth >= DEPTH or not callable(function):
            return
        for held in held_by(function):
            if held.cell is not None:
                self._found.cells.append(held.cell)
            if held.name.startswith("global "):
                self._enter_global(function, held, depth)
            else:
                self._push((held.value,), depth + 1)
        if isinstance(function, FunctionType):
            self._found.fields.append(vars(function))

    def _enter_global(self, function: FunctionType, held: Held, depth: int) -> None:
        """Go on to a global variable, but to a function only where it is of the same file."""
        if is_number(held.value):
            self._found.names.append((function.__globals__, held.name.removeprefix("global ")))
        elif not isinstance(held.value, FunctionType) or held.value.__globals__ is function.__globals__:
            self._push((held.value,), depth + 1)

    def _slots_of(self, of: type) -> tuple[Any, ...]:
        if of not in self._slots:
            self._slots[of] = slots_of(of)
        return self._slots[of]


ENTER: dict[int, Callable[[Walk, Any, int], None]] = {
    MODULE: Walk._enter_module,
    MAPPING: Walk._enter_mapping,
    LISTED: Walk._enter_listed,
    TUPLE: Walk._enter_tuple,
    RANDOM: Walk._enter_random,
    OBJECT: Walk._enter_object,
    CALLABLE: Walk._enter_callable,
}
