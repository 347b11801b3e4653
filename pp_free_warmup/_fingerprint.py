"""Reduce a value to a short text that changes when the value does, and name the parts of it by path."""

from __future__ import annotations

import enum
import hashlib
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

DEEPEST = 8
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
OPAQUE = (torch.nn.Module, ModuleType, FunctionType, BuiltinFunctionType, MethodType, type)


class Fingerprints:
    """Take fingerprints of many values, each object once: met again, it is named by its first path.

    Example:
        >>> [path for path, _ in Fingerprints().of({"a": 1, "b": [2, 3]}, "it")]
        ["it['a']", "it['b'][0]", "it['b'][1]", "it['b'].len", 'it.len']
    """

    def __init__(self) -> None:
        self._met: dict[int, tuple[object, str]] = {}  # the object too: its id must not be used again

    def of(self, value: object, path: str) -> Iterator[tuple[str, str]]:
        """Yield a path and a text for every leaf that *value* reaches.

        Dicts, lists, tuples, sets, deques and the fields of objects are walked; tensors are hashed
        by their bytes, generators by their state. A module, a function, a class, or an object of
        torch or the standard library is one leaf, known by which object it is.

        Args:
            value: Where to start.
            path: How to call it.
        """
        yield from self._walk(value, path, DEEPEST)

    def _walk(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
        if isinstance(value, PLAIN):
            yield path, repr(value)
            return
        first = self._met.setdefault(id(value), (value, path))[1]
        if first != path:
            yield path, f"the same object as {first}"
            return
        leaf = _leaf(value)
        if leaf is not None or depth == 0:
            yield path, leaf or _identity(value)
            return
        for name, part in _parts(value):
            yield from self._walk(part, path + name, depth - 1)
        if hasattr(value, "__len__"):
            yield f"{path}.len", str(len(value))


def _leaf(value: Any) -> str | None:
    """Return the text of a value that has no parts worth a path of their own, else None."""
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, torch.Generator):
        return _of_tensor(value.get_state())
    if isinstance(value, CONTAINERS):
        return None
    home = type(value).__module__.partition(".")[0]
    walked = hasattr(value, "__dict__") and (home not in LEFT_ALONE or type(value).__name__ in NAMESPACES)
    return None if walked and not isinstance(value, OPAQUE) else _identity(value)


def _identity(value: Any) -> str:
    return repr(value) if isinstance(value, enum.Enum) else f"{type(value).__qualname__} at {id(value):#x}"


LEFT_ALONE = frozenset({"torch", *sys.stdlib_module_names})
NAMESPACES = frozenset({"Namespace", "SimpleNamespace"})
CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r:.60}]", part) for key, part in list(value.items())]
    if isinstance(value, (list, tuple, deque)):
        return [(f"[{place}]", part) for place, part in enumerate(list(value))]
    if isinstance(value, (set, frozenset)):
        return [(f"{{{text}}}", None) for text in sorted(_of_member(member) for member in value)]
    return [(f".{name}", part) for name, part in list(vars(value).items())]


def _of_member(member: Any) -> str:
    return repr(member) if isinstance(member, PLAIN) else _identity(member)


def _of_tensor(tensor: torch.Tensor) -> str:
    """Hash the bytes of a tensor; one on the meta device, or of a subclass, by what it says of itself."""
    kind = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device} grad={tensor.requires_grad}"
    if tensor.is_meta or tensor.layout is not torch.strided:
        return kind
    with torch.no_grad():
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{kind} {hashlib.blake2b(raw.numpy().tobytes(), digest_size=12).hexdigest()}"
