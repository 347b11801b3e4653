"""Walk over everything reachable from a model and write down each field's value under its path.

The walk goes by what objects are, not by a list of known fields: a tracker that
a later release of Megatron adds is found without a change here.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pp_free_warmup._digest import bytes_digest, tensor_digest

PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, range, slice)
SEQUENCES = (list, tuple, deque)
OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
# Packages whose objects are opened up; an object of any other package is known by identity only.
OPENED = ("megatron", "transformer_engine", "pp_free_warmup", "torch.optim")

Fields = dict[str, str]


class StateWalk:
    """One walk: the fields found, and the objects met.

    Args:
        opened: More packages (or modules) whose objects are opened up.

    Attributes:
        fields: Path to text. Objects stand there by type and identity, tensors by bits too.
        met: Every object met, by id: each is entered once, and stays alive so that no id is reused.
    """

    def __init__(self, opened: Iterable[str] = ()) -> None:
        self.fields: Fields = {}
        self.met: dict[int, Any] = {}
        self._opened = (*OPENED, *opened)

    def visit(self, path: str, value: Any) -> None:
        """Write down *value* and what it leads to."""
        if value is None or isinstance(value, PLAIN):
            self.fields[path] = repr(value)
            return
        self.fields[path] = _named(value)
        if id(value) in self.met:
            return
        self.met[id(value)] = value
        self._enter(path, value)

    def _enter(self, path: str, value: Any) -> None:
        """Go on inside an object met for the first time."""
        enter = next((enter for kind, enter in self._doors() if isinstance(value, kind)), None)
        if enter is not None:
            enter(path, value)
        elif self._is_open(value):
            self.attributes(path, vars(value))

    def _doors(self) -> tuple[tuple[Any, Callable[[str, Any], None]], ...]:
        return (
            (torch.Tensor, self._tensor),
            (torch.nn.Module, self._module),
            (torch.Generator, self._generator),
            (Mapping, self._mapping),
            (SEQUENCES, self._sequence),
            ((set, frozenset), self._set),
            (OPAQUE, _closed),
        )

    def _is_open(self, value: Any) -> bool:
        home = type(value).__module__
        ours = any(home == package or home.startswith(package + ".") for package in self._opened)
        return hasattr(value, "__dict__") and (ours or dataclasses.is_dataclass(value))

    def attributes(self, path: str, attributes: Mapping[str, Any]) -> None:
        """Visit attributes by name."""
        for name, value in list(attributes.items()):
            self.visit(f"{path}.{name}", value)

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        self.fields[path] = f"{tensor_digest(tensor)} {self.fields[path]}"
        if isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.grad is not None):
            self.visit(f"{path}.grad", tensor.grad)
        self.attributes(path, vars(tensor))

    def _module(self, path: str, module: torch.nn.Module) -> None:
        """Visit parameters, buffers (those that are not saved too), children and plain fields, hooks included."""
        inner = {name: value for name, value in vars(module).items() if name in ("_parameters", "_buffers", "_modules")}
        for registered in inner.values():
            self.attributes(path, registered)
        self.attributes(path, {name: value for name, value in vars(module).items() if name not in inner})

    def _generator(self, path: str, generator: torch.Generator) -> None:
        self.fields[path] = f"{bytes_digest(generator.get_state().numpy().tobytes())} {self.fields[path]}"

    def _mapping(self, path: str, mapping: Mapping[Any, Any]) -> None:
        for number, (key, value) in enumerate(list(mapping.items())):
            name = repr(key) if isinstance(key, PLAIN) else f"#{number}"
            if not isinstance(key, PLAIN):
                self.visit(f"{path}.keys[{name}]", key)
            self.visit(f"{path}[{name}]", value)

    def _sequence(self, path: str, sequence: Iterable[Any]) -> None:
        for number, value in enumerate(list(sequence)):
            self.visit(f"{path}[{number}]", value)

    def _set(self, path: str, members: Iterable[Any]) -> None:
        names = (repr(each) if isinstance(each, PLAIN) else _named(each) for each in members)
        self.fields[path] += f" of {sorted(names)}"


def _named(value: Any) -> str:
    return f"{type(value).__name__} object {id(value):#x}"


def _closed(_path: str, _value: Any) -> None:
    """Stay outside: functions, classes and modules are known by identity."""
