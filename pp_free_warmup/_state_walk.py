"""Walk over everything reachable from a model and write down each field's value under its path.

The walk goes by what objects are, not by a list of known fields: a tracker that a later release
of Megatron adds is found without a change here. It reads values where they are stored, by the
builtins' own methods; nothing of what it meets is called, iterated or imported.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import queue
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import wrapt

from pp_free_warmup._callables import METHODS, code_of, held_by, own_fields, stored
from pp_free_warmup._digest import LONGEST_KEY, PLAIN, plain_text, shortened, state_reader, tensor_digest
from pp_free_warmup._origins import Origins

PLAIN_HOLDERS = (types.SimpleNamespace, argparse.Namespace, queue.Queue, collections.UserDict, collections.UserList)
CALLABLES = (*METHODS, types.FunctionType, functools.partial, functools._lru_cache_wrapper, wrapt.BaseObjectProxy)
UNWRAPPED = (staticmethod, classmethod, functools.partialmethod)
# Entered before all else: a parameter is known by its module, not by a wrapper's list of all of them.
NAMED_BY_MODULES = (torch.nn.Module, torch.Tensor)

DEEPEST = 40
MOST_OBJECTS = 500_000
MOST_ELEMENTS = 10_000

Fields = dict[str, str]


class StateWalk:
    """One walk: the fields found, and the objects met.

    What is near is entered first, each object once, up to `DEEPEST` steps from where the walk
    began, `MOST_OBJECTS` objects and the first and last `MOST_ELEMENTS` elements of a container.

    Args:
        homes: Installed packages or modules whose objects and files are looked at like the user's own.
        tensor_text: What stands for a tensor's values.

    Attributes:
        fields: Path to text. Objects stand there by type and identity, tensors by bits too.
        met: Every object met, by id: it stays alive so that no id is reused.
        origins: Knows the files that the code met is from.
    """

    def __init__(self, homes: Iterable[str] = (), tensor_text: Callable[[torch.Tensor], str] = tensor_digest) -> None:
        self.fields: Fields = {}
        self.met: dict[int, Any] = {}
        self.origins = Origins(homes)
        self._tensor_text = tensor_text
        self._entered: set[int] = set()
        self._classes: dict[int, type] = {}
        self._first, self._waiting = collections.deque[Any](), collections.deque[Any]()
        self._depth = 0
        self._doors: dict[type, Callable[[str, Any], None] | None] = {}

    def visit(self, path: str, value: Any) -> None:
        """Write down *value* and what it leads to."""
        self._see(path, value)
        self._drain()

    def _drain(self) -> None:
        while self._first or self._waiting:
            path, value, enter, self._depth = (self._first or self._waiting).popleft()
            enter(path, value)
        self._depth = 0

    def visit_holder(self, path: str, holder: Any) -> None:
        """Visit an object and its fields, whatever its type."""
        self.visit(path, holder)
        for name, value in own_fields(holder).items():
            self.visit(f"{path}.{name}", value)

    def visit_file(self, name: str, module: types.ModuleType) -> None:
        """Write down the data in a module's globals, its functions' and its classes' attributes."""
        self.fields[f"{name}:"] = "loaded"
        for key, value in list(vars(module).items()):
            if issubclass(type(value), types.ModuleType):
                self.origins.add_file(str(stored(value, "__name__")))
            elif not key.startswith("__"):
                self.visit(f"{name}:{key}", value)
                if issubclass(type(value), type):
                    self._visit_class(name, value)
                    self._drain()

    def _see(self, path: str, value: Any) -> None:
        kind = type(value)
        if issubclass(kind, PLAIN):
            self.fields[path] = plain_text(value)
            return
        self.fields[path] = _named(value)
        self.met[id(value)] = value
        if kind not in self._doors:
            self._doors[kind] = self._door(kind)
        enter = self._doors[kind]
        if enter and id(value) not in self._entered and self._depth < DEEPEST and len(self._entered) < MOST_OBJECTS:
            self._entered.add(id(value))
            waiting = self._first if issubclass(kind, NAMED_BY_MODULES) else self._waiting
            waiting.append((path, value, enter, self._depth + 1))

    def _door(self, kind: type) -> Callable[[str, Any], None] | None:
        """Return what goes on inside objects of a type."""
        doors = (
            (torch.Tensor, self._tensor),
            (torch.nn.Module, self._module),
            (type, lambda _path, value: self._class(value)),
            (types.ModuleType, lambda _path, value: self.origins.add_file(str(stored(value, "__name__")))),
            (CALLABLES, self._callable),
            (dict, self._mapping),
            ((list, tuple, collections.deque), self._sequence),
            ((set, frozenset), self._set),
        )
        enter = next((enter for base, enter in doors if issubclass(kind, base)), None)
        if enter is None and state_reader(kind) is not None:
            enter = self._state
        return enter or (self._object if self._is_open(kind) else None)

    def _is_open(self, kind: type) -> bool:
        plain = issubclass(kind, PLAIN_HOLDERS) or dataclasses.is_dataclass(kind)
        return plain or self.origins.looks_into(str(kind.__module__))

    def _object(self, path: str, value: Any) -> None:
        """Visit the fields of an object whose type is looked into, slots included, and the type's attributes."""
        if self._is_open(type(value)):
            for name, field in own_fields(value).items():
                self._see(f"{path}.{name}", field)
            self._class(type(value))

    def _class(self, kind: type) -> None:
        """Leave a class and its bases to the visits of their files; visit those that no file has."""
        for base in kind.__mro__:
            home = str(base.__module__)
            if self.origins.looks_into(home):
                self.origins.add_file(home)
                if "<locals>" in base.__qualname__ or home not in sys.modules:
                    self._visit_class(home, base)

    def _visit_class(self, home: str, kind: type) -> None:
        """Visit a class's data attributes (Megatron keeps several trackers there) and what its methods hold."""
        if id(kind) not in self._classes and kind.__module__ == home:
            self._classes[id(kind)] = kind
            for name, value in list(vars(kind).items()):
                if issubclass(type(value), type):
                    self._visit_class(home, value)
                self._class_attribute(f"{home}:{kind.__qualname__}.{name}", name, value)

    def _class_attribute(self, path: str, name: str, value: Any) -> None:
        if type(value) in UNWRAPPED:
            value = stored(value, "__func__") or stored(value, "func")
        is_data = not hasattr(type(value), "__get__") or type(value) is types.FunctionType
        if is_data and not (name.startswith("_abc_") or (name.startswith("__") and not callable(value))):
            self._see(path, value)

    def _callable(self, path: str, value: Any) -> None:
        """Visit what a callable holds; the globals that its code names are found in its file."""
        passed_over = self._passed_over(value)
        for held in held_by(value):
            what = held.name.partition(" ")[0]
            is_fixed = what == "default" and issubclass(type(held.value), PLAIN)
            if what not in passed_over and not is_fixed:
                self._see(f"{path} {held.name}", held.value)

    def _passed_over(self, value: Any) -> tuple[str, ...]:
        if type(value) is not types.FunctionType:
            return ()
        home = str(value.__globals__.get("__name__"))
        if not self.origins.looks_into(home):
            return ("global", "default", "attribute")
        self.origins.add_file(home)
        for code in code_of(value):  # modules imported inside a function are none of its globals
            for name in sys.modules.keys() & set(code.co_names):
                self.origins.add_file(name)
        in_file = home in sys.modules and stored(sys.modules[home], "__dict__") is value.__globals__
        return ("global",) if in_file else ()

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        self.fields[path] = f"{self._tensor_text(tensor)} {self.fields[path]}"
        with torch._C.DisableTorchFunction():
            grad = tensor.grad if tensor.is_leaf else None
            held = {"grad": grad, "hooks": tensor._backward_hooks, "grad_hooks": tensor._post_accumulate_grad_hooks}
        held = {name: value for name, value in held.items() if value is not None}
        if issubclass(type(tensor), torch.nn.Parameter):
            held = {"grad": grad, **held}
        for name, value in {**held, **own_fields(tensor)}.items():
            self._see(f"{path}.{name}", value)

    def _module(self, path: str, module: torch.nn.Module) -> None:
        """Visit parameters, buffers (those that are not saved too), children and plain fields, hooks included."""
        fields = own_fields(module)
        registered = [fields.pop(name, {}) for name in ("_parameters", "_buffers", "_modules")]
        for attributes in (*registered, fields):
            for name, value in list(attributes.items()):
                self._see(f"{path}.{name}", value)
        self._class(type(module))

    def _state(self, path: str, value: Any) -> None:
        read = state_reader(type(value))
        assert read is not None
        self.fields[path] = f"{read(value)} {self.fields[path]}"
        self._object(path, value)

    def _mapping(self, path: str, mapping: dict[Any, Any]) -> None:
        kind = next(base for base in (collections.OrderedDict, dict) if issubclass(type(mapping), base))
        for number, (key, value) in self._ends(path, kind.items(mapping)):
            is_plain = issubclass(type(key), PLAIN)
            name = plain_text(key, LONGEST_KEY) if is_plain else f"#{number}"
            if not is_plain:
                self._see(f"{path}.keys[{name}]", key)
            self._see(f"{path}[{name}]", value)
        self._own(path, mapping)

    def _sequence(self, path: str, sequence: Any) -> None:
        kind = next(base for base in (list, tuple, collections.deque) if issubclass(type(sequence), base))
        for number, value in self._ends(path, kind.__iter__(sequence)):
            self._see(f"{path}[{number}]", value)
        self._own(path, sequence)

    def _set(self, path: str, members: Any) -> None:
        kind = set if issubclass(type(members), set) else frozenset
        plain = [plain_text(one) for one in kind.__iter__(members) if issubclass(type(one), PLAIN)]
        objects = [_named(one) for one in kind.__iter__(members) if not issubclass(type(one), PLAIN)]
        self.fields[path] += f" of {shortened(str(sorted(plain)))} {sorted(objects)}"
        self._own(path, members)

    def _ends(self, path: str, elements: Iterable[Any]) -> Iterable[tuple[int, Any]]:
        """Number the elements; of a long container note the length, and leave out the middle."""
        numbered = list(enumerate(list(elements)))
        if len(numbered) <= 2 * MOST_ELEMENTS:
            return numbered
        self.fields[path] += f" of {len(numbered)}"
        return numbered[:MOST_ELEMENTS] + numbered[-MOST_ELEMENTS:]

    def _own(self, path: str, container: Any) -> None:
        """Visit what a subclass of a builtin container has beside its contents."""
        if type(container).__module__ not in ("builtins", "collections"):
            self._object(path, container)


def _named(value: Any) -> str:
    return f"{type(value).__name__} object {id(value):#x}"
