"""Copy a batch so that writing to the copy cannot reach the original."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import torch


def copy_of_batch(item: Any) -> Any:
    """Copy dicts, lists, tuples, named tuples, dataclasses (frozen too), tensors and what has ``clone()``.

    Tensors keep size, stride, dtype, ``requires_grad`` and pinning; views of one storage stay views
    of one storage, and an object that appears twice appears twice in the copy. Only the span of a
    storage that the batch uses is copied. Everything else (a process group in PackedSeqParams, a
    string) is shared.

    Args:
        item: What an iterator returned.

    Returns:
        The copy.

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
        if isinstance(item, (dict, UserDict, list)) or _is_record(item):
            return self._copy_mutable(item)
        made = self._copy_rest(item)
        self._memo[id(item)] = (item, made)
        return made

    def _copy_mutable(self, item: Any) -> Any:
        made = copy.copy(item)  # keeps the subclass, and what a defaultdict needs
        self._memo[id(item)] = (item, made)  # before its parts: one of them may lead back to it
        if isinstance(item, (dict, UserDict)):
            for key, value in item.items():
                made[key] = self.copy(value)
        elif isinstance(item, list):
            made[:] = [self.copy(value) for value in item]
        else:
            for name, value in _fields(item).items():
                object.__setattr__(made, name, self.copy(value))  # past a frozen dataclass's refusal
        return made

    def _copy_rest(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return self._copy_tensor(item)
        if isinstance(item, tuple):
            values = [self.copy(value) for value in item]
            return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
        return item.clone() if callable(getattr(item, "clone", None)) and not isinstance(item, type) else item

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
    if isinstance(item, (dict, UserDict)):
        return list(item.values())
    if isinstance(item, (list, tuple)):
        return list(item)
    return list(_fields(item).values()) if _is_record(item) else []


def _is_record(item: Any) -> bool:
    return dataclasses.is_dataclass(item) and not isinstance(item, type)


def _fields(item: Any) -> dict[str, Any]:
    return {field.name: getattr(item, field.name) for field in dataclasses.fields(item) if hasattr(item, field.name)}


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
