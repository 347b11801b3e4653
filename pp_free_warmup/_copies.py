"""Copy a batch so that writing to the copy cannot reach the original."""

from __future__ import annotations

import copy
import sys
import types
from collections import UserDict, deque
from collections.abc import Iterator
from typing import Any

import torch

from pp_free_warmup._callables import own_fields
from pp_free_warmup._progress import is_of_others
from pp_free_warmup.errors import UnsupportedSetup

MUTABLE = (dict, UserDict, list, deque)
LEAVES = (int, float, str, bytes, torch.Tensor, types.ModuleType, type(None))
OBJECTS = 10_000  # what leads to more objects is no batch


def copy_of_batch(item: Any) -> Any:
    """Copy builtin containers, tensors, arrays, dataclasses (frozen too), plain objects and what has ``clone()``.

    Tensors keep size, stride, dtype, ``requires_grad`` and pinning; views of one storage stay views
    of one storage, and an object that appears twice appears twice in the copy. Only the span of a
    storage that the batch uses is copied. Everything else (a process group in PackedSeqParams, a
    string, a module, an object that leads to one) is shared.

    Args:
        item: What an iterator returned.

    Returns:
        The copy.

    Raises:
        UnsupportedSetup: An object with tensors of its own refuses to be copied.

    Example:
        >>> tokens = torch.arange(6)
        >>> twin = copy_of_batch({"tokens": tokens, "labels": tokens[1:]})
        >>> _ = twin["tokens"].zero_()
        >>> twin["labels"].tolist(), tokens.tolist()
        ([0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5])
    """
    spans: dict[int, tuple[int, int]] = {}
    for tensor in _tensors(item, set()):
        low, high = _span(tensor)
        before = spans.get(_storage_key(tensor), (low, high))
        spans[_storage_key(tensor)] = (min(low, before[0]), max(high, before[1]))
    return _Copier(spans).copy(item)


class _Copier:
    def __init__(self, spans: dict[int, tuple[int, int]]) -> None:
        self._spans = spans
        self._storages: dict[int, torch.Tensor] = {}
        self._memo: dict[int, tuple[Any, Any]] = {}  # the original too: its id must not be reused

    def copy(self, item: Any) -> Any:
        known = self._memo.get(id(item))
        if known is not None:
            return known[1]
        mutable = isinstance(item, MUTABLE) or _is_object_array(item) or _is_record(item)
        if mutable and (made := _shell(item)) is not item:
            self._memo[id(item)] = (item, made)  # before its parts: one of them may lead back to it
            self._fill(made, item)
            return made
        made = self._copy_rest(item)
        self._memo[id(item)] = (item, made)
        return made

    def _fill(self, made: Any, item: Any) -> None:
        for key, value in _items(item):
            made[key] = self.copy(value)
        if getattr(item, "__dict__", None) is item:  # attributes and keys are one
            made.__dict__ = made
            return
        for name, value in _fields(item).items():
            object.__setattr__(made, name, self.copy(value))  # past a frozen dataclass's refusal

    def _copy_rest(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            with torch.inference_mode(item.is_inference()):
                return self._copy_tensor(item)
        if isinstance(item, tuple):
            values = [self.copy(value) for value in item]
            return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
        if isinstance(item, (set, bytearray)) or _is_array(item):
            return copy.copy(item)
        return item.clone() if _clones(item) else item

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if not _is_plain(tensor):
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        key = _storage_key(tensor)
        low, high = self._spans[key]
        if key not in self._storages:
            self._storages[key] = _bytes_of(tensor, low, high).clone()
            if tensor.is_pinned():
                self._storages[key] = self._storages[key].pin_memory()
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        offset = (tensor.storage_offset() * tensor.element_size() - low) // tensor.element_size()
        made.set_(self._storages[key].untyped_storage(), offset, tensor.size(), tensor.stride())
        return made.requires_grad_(tensor.requires_grad)


def _tensors(item: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(item) in seen:
        return
    seen.add(id(item))
    if isinstance(item, torch.Tensor):
        if _is_plain(item):
            yield item
        return
    for part in _parts(item):
        yield from _tensors(part, seen)


def _parts(item: Any) -> list[Any]:
    if isinstance(item, tuple):
        return list(item)
    has_fields = isinstance(item, MUTABLE) or _is_record(item)
    return [value for _, value in _items(item)] + (list(_fields(item).values()) if has_fields else [])


def _items(item: Any) -> list[tuple[Any, Any]]:
    """Return what ``item[key]`` leads to, by key."""
    if isinstance(item, (dict, UserDict)):
        return list(item.items())
    if isinstance(item, (list, deque)):
        return list(enumerate(item))
    return list(sys.modules["numpy"].ndenumerate(item)) if _is_object_array(item) else []


def _fields(item: Any) -> dict[str, Any]:
    found = {} if getattr(item, "__dict__", None) is item else own_fields(item)
    if isinstance(item, UserDict):
        found.pop("data", None)  # its items
    return found


def _is_array(item: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(item, numpy.ndarray)


def _is_object_array(item: Any) -> bool:
    return _is_array(item) and item.dtype.hasobject and item.dtype.names is None


def _clones(item: Any) -> bool:
    return callable(getattr(item, "clone", None)) and not isinstance(item, type)


def _shell(item: Any) -> Any:
    """Return a shallow copy, of the same class and with what a subclass needs beyond its items."""
    try:
        return copy.copy(item)
    except Exception as refusal:
        if not any(isinstance(value, torch.Tensor) or _is_array(value) for value in _parts(item)):
            return item
        name = f"{type(item).__module__}.{type(item).__qualname__}"
        raise UnsupportedSetup(
            "A part of the batch cannot be copied.",
            found=f"copy.copy of a {name}: {type(refusal).__name__}: {refusal}; expected a copy.",
            matters="What the warmup's forward step writes into it would be seen by the real step.",
            do="Give the class a clone() or a __copy__, or hand it over as a dict or a dataclass.",
        ) from refusal


def _is_record(item: Any) -> bool:
    """Tell whether this is a dataclass or a plain object: fields, and nothing that the process has only once."""
    if isinstance(item, (type, *LEAVES)) or not own_fields(item):
        return False
    if hasattr(type(item), "__dataclass_fields__"):
        return True
    return _is_plain_object(item) and not _leads_to_a_module(item)


def _is_plain_object(item: Any) -> bool:
    once = ("__call__", "__next__", "__enter__", "clone", "fileno")  # functions, iterators, locks, streams, files
    if isinstance(item, (types.ModuleType, torch.nn.Module, torch.distributed.ProcessGroup)) or is_of_others(item):
        return False
    kind = type(item)
    if isinstance(item, (dict, UserDict, list, tuple, set, deque)):
        return False
    if any(name in vars(base) for base in kind.__mro__ for name in once):  # not hasattr: every class can be called
        return False
    own = any(name in vars(base) for base in kind.__mro__[:-1] for name in ("__reduce__", "__reduce_ex__"))
    return not own or hasattr(kind, "__copy__") or isinstance(item, types.SimpleNamespace) or _has_tensors(item)


def _has_tensors(item: Any) -> bool:
    return any(isinstance(value, torch.Tensor) or _is_array(value) for value in own_fields(item).values())


def _leads_to_a_module(item: Any) -> bool:
    """Tell whether this object is a piece of the program (a trainer, an optimizer) rather than of its data."""
    seen: set[int] = set()
    waiting = [item]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (torch.nn.Module, torch.nn.Parameter)) or len(seen) > OBJECTS:
            return True
        if not isinstance(value, LEAVES) and not callable(value) and id(value) not in seen:
            seen.add(id(value))
            waiting += value if isinstance(value, tuple) else [part for _, part in _items(value)]
            waiting += own_fields(value).values()
    return False


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor is an ordinary strided one, of a storage that can be copied by bytes."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    lazy = tensor.is_conj() or tensor.is_neg()  # a flag on the view, not in the bytes
    return not (tensor.is_meta or tensor.is_nested or tensor.is_quantized or lazy)


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # two views of one storage share this


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes that a tensor uses of its storage, widened to multiples of 16 (any element size)."""
    size = tensor.element_size()
    low = tensor.storage_offset() * size
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    reach = sum((int(n) - 1) * int(step) for n, step in steps) if tensor.numel() else -1
    return low // 16 * 16, int(low + (reach + 1) * size)


def _bytes_of(tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), low, (max(high - low, 0),), (1,))
