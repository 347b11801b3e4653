"""What a walk makes of a value, by its class: a module, a container, a generator, a plain object, or nothing."""

from __future__ import annotations

import concurrent.futures
import enum
import functools
import queue
import threading
from collections import deque
from multiprocessing.process import BaseProcess
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from pp_free_warmup._generators import is_generator

# Packages whose objects are left as they are: compiled code and its caches, locks, threads, files, ourselves.
COMPILERS = {"torch", "triton", "tilelang", "tvm", "cutlass", "flashinfer", "deep_gemm", "numpy"}
THREADS = {"threading", "_thread", "concurrent", "multiprocessing", "asyncio", "ray", "subprocess", "socket", "ssl"}
LIBRARY = {"logging", "weakref", "io", "_io", "ctypes", "importlib", "inspect", "re", "pathlib", "typing", "wrapt"}
CLOSED = COMPILERS | THREADS | LIBRARY | {"pp_free_warmup"}
NUMBERS = (bool, int, float, str)  # variables of these kinds are counters and flags
# Whose holder is written to by other threads too: putting its containers back could lose what they have put in.
WORKERS = (threading.Thread, concurrent.futures.Executor, BaseProcess, queue.Queue, queue.SimpleQueue)
# By what an optimizer that is none of torch's, such as Megatron's, is known; a trainer that steps has no groups.
OPTIMIZER = ("step", "zero_grad", "param_groups")
OURS_FOR_TESTS = "pp_free_warmup.testing"

UNKNOWN = -1
SKIPPED, MODULE, MAPPING, LISTED, TUPLE, RANDOM, OBJECT, CALLABLE = range(8)


def slots_read(value: object, slots: tuple[Any, ...]) -> dict[Any, Any]:
    """Return what the slots of an object hold, by descriptor; those that are not set are left out."""
    found = {}
    for slot in slots:
        try:
            found[slot] = slot.__get__(value)
        except AttributeError:
            continue
    return found


def is_number(value: object) -> bool:
    """Tell whether a variable that holds this is a counter, a flag or a text: replaced, never changed."""
    return isinstance(value, NUMBERS)


def is_shared(value: object) -> bool:
    """Tell whether an object is, or holds, what other threads or processes work with."""
    return isinstance(value, WORKERS) or any(isinstance(held, WORKERS) for held in (fields_of(value) or {}).values())


def fields_of(value: object) -> dict[str, Any] | None:
    """Return the ``__dict__`` of an object, whatever its class says of attributes; None where it has none."""
    try:
        fields = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return fields if isinstance(fields, dict) else None


def kind_of(of: type) -> int:
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
    optimizes = issubclass(of, torch.optim.Optimizer) or all(hasattr(of, name) for name in OPTIMIZER)  # never touched
    advances = hasattr(of, "__next__")  # what a fetch takes from it is gone, and is served again
    has_fields = of.__dictoffset__ != 0 or any("__slots__" in vars(base) for base in of.__mro__)
    return has_fields and not optimizes and not advances


def slots_of(of: type) -> tuple[Any, ...]:
    """Return the descriptors of the slots that a class and its bases declare."""
    bases = [vars(base) for base in of.__mro__ if "__slots__" in vars(base)]
    members = [member for base in bases for member in base.values()]
    return tuple(member for member in members if isinstance(member, MemberDescriptorType))
