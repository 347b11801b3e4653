"""What a pass can reach: modules, the fields of objects, containers and random generators.

The walk goes by what things are, not by a list of names, so that a field which a later
release of Megatron adds, or a trainer's own class, is found without a change here. It only
looks: no property, ``__getattr__``, ``__eq__`` or iterator of anybody's is called.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from pp_free_warmup._callables import Held, held_by
from pp_free_warmup._generators import is_generator

# How many links are followed from a module or a forward step, and into how large a container.
DEPTH = 6
ITEMS = 10_000
# Packages whose objects are left as they are: compiled code and its caches, locks, threads, files, ourselves.
COMPILERS = {"torch", "triton", "tilelang", "tvm", "cutlass", "flashinfer", "deep_gemm", "numpy"}
THREADS = {"threading", "_thread", "concurrent", "multiprocessing", "asyncio", "ray", "subprocess", "socket", "ssl"}
LIBRARY = {"logging", "weakref", "io", "_io", "ctypes", "importlib", "inspect", "re", "pathlib", "typing", "wrapt"}
CLOSED = COMPILERS | THREADS | LIBRARY | {"pp_free_warmup"}
NUMBERS = (bool, int, float, str)  # global variables of these kinds are counters and flags
OURS_FOR_TESTS = "pp_free_warmup.testing"

UNKNOWN = -1
SKIPPED, MODULE, MAPPING, LISTED, TUPLE, RANDOM, OBJECT, CALLABLE = range(8)


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
        names: Global variables that a function names and that are counters or flags: the file's globals, the name.
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
                kind = kinds[of] = _kind_of(of)
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
        fields = _fields_of(value)
        if fields is not None:
            self._found.fields.append(fields)
            if self._opens:
                self._found.lasting.add(id(fields))
        slots = self._slots_of(type(value))
        if slots:
            self._found.slotted.append((value, slots))
        if depth < DEPTH:
            self._push(tuple((fields or {}).values()), depth + 1)
            self._push(slots_read(value, slots).values(), depth + 1)
            if self._opens and callable(value):
                self._enter_callable(value, depth)

    def _enter_callable(self, function: Any, depth: int) -> None:
        if not self._opens or depth >= DEPTH:
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
        if isinstance(held.value, NUMBERS):
            self._found.names.append((function.__globals__, held.name.removeprefix("global ")))
        elif not isinstance(held.value, FunctionType) or held.value.__globals__ is function.__globals__:
            self._push((held.value,), depth + 1)

    def _slots_of(self, of: type) -> tuple[Any, ...]:
        if of not in self._slots:
            bases = [vars(base) for base in of.__mro__ if "__slots__" in vars(base)]
            members = [member for base in bases for member in base.values()]
            self._slots[of] = tuple(member for member in members if isinstance(member, MemberDescriptorType))
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


def slots_read(value: object, slots: tuple[Any, ...]) -> dict[Any, Any]:
    """Return what the slots of an object hold, by descriptor; those that are not set are left out."""
    found = {}
    for slot in slots:
        try:
            found[slot] = slot.__get__(value)
        except AttributeError:
            continue
    return found


def _fields_of(value: object) -> dict[str, Any] | None:
    try:
        fields = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return fields if isinstance(fields, dict) else None


def _kind_of(of: type) -> int:
    """Say how a value of this class is entered, for the first value of each class."""
    for kinds, kind in (
        (torch.nn.Module, MODULE),
        ((torch.Tensor, type, ModuleType, enum.Enum, BaseException), SKIPPED),
        (dict, MAPPING),
        ((list, set, deque), LISTED),
        ((tuple, frozenset), TUPLE),
        ((FunctionType, MethodType, functools.partial), CALLABLE),
    ):
        if issubclass(of, kinds):
            return kind
    if is_generator(of):
        return RANDOM
    return OBJECT if _is_open(of) else SKIPPED


def _is_open(of: type) -> bool:
    """Tell whether an object of this class is a plain one that holds state of its own."""
    home = str(of.__module__)
    if home.partition(".")[0] in CLOSED and not home.startswith(OURS_FOR_TESTS):
        return False
    steps = hasattr(of, "step") and hasattr(of, "zero_grad")  # an optimizer: never touched
    advances = hasattr(of, "__next__")  # what a fetch takes from it is gone, and is served again
    has_fields = of.__dictoffset__ != 0 or any("__slots__" in vars(base) for base in of.__mro__)
    return has_fields and not steps and not advances
