"""The limits of what `verify` sees, as the documentation states them: one row, one test."""

from __future__ import annotations

import contextvars
import ctypes
import itertools
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pp_free_warmup import _state_walk
from pp_free_warmup._trace import changes, observed

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "add-a-guard.md"
CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("steps", default=0)


class Counter:
    """Counts in a field."""

    def __init__(self, following: Any = None) -> None:
        self.following = following
        self.steps = 0

    def count(self) -> None:
        """Count at the end of the chain."""
        last = self
        while last.following is not None:
            last = last.following
        last.steps += 1


class Computed:
    """A class attribute that computes an attribute, and counts how often."""

    def __init__(self) -> None:
        self.steps = 0

    def __get__(self, owner: Any, kind: Any) -> int:
        self.steps += 1
        return self.steps


class Owner:
    """Has such an attribute."""

    computed = Computed()


def _calling(holder: Any, count: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a step that closes over *holder* and does *count* to it."""
    return lambda: count(holder)


def _generator() -> Callable[[], Any]:
    def numbers() -> Iterator[int]:
        steps = 0
        while True:
            steps += 1
            yield steps

    return _calling(numbers(), next)


def _weakly_held() -> Callable[[], Any]:
    counter = Counter()
    reference = weakref.ref(counter)
    weakref.finalize(Owner, counter.count)  # keeps it alive, where the walk does not look
    return _calling(reference, lambda each: each().count())


def _unnamed_file() -> Callable[[], Any]:
    module = types.ModuleType("unnamed_file")
    vars(module)["SEEN"] = []
    sys.modules["unnamed_file"] = module
    return lambda: sys.modules["unnamed_file"].SEEN.append(1)


def _node_of_a_graph() -> Callable[[], Any]:
    weight, counter = torch.zeros(1, requires_grad=True), Counter()
    weight.grad = torch.zeros(1)
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    weakref.finalize(Owner, counter.count)
    node.register_hook(lambda *_: counter.count())

    def step() -> None:
        weight.sum().backward()
        node.metadata["alive"] = True
        weight.grad.zero_()  # type: ignore[union-attr]

    return step


def _chain() -> Callable[[], Any]:
    first = Counter()
    for _ in range(_state_walk.DEEPEST + 1):
        first = Counter(first)
    return _calling(first, Counter.count)


def _long_list() -> Callable[[], Any]:
    middle = _state_walk.MOST_ELEMENTS
    return _calling([0] * (2 * middle + 2), lambda each: each.__setitem__(middle, 1))


def _thread_local() -> Callable[[], Any]:
    own = threading.local()
    own.steps = [0]
    return _calling(own, lambda each: each.steps.append(1))


def _mapped(folder: Path) -> Callable[[], Any]:
    return _calling(np.memmap(folder / "mapped", np.int8, "w+", shape=(1,)), lambda each: each.fill(1))


def _file(folder: Path) -> Callable[[], Any]:
    return _calling(folder / "log", lambda path: path.write_text("1"))


NOT_SEEN: dict[str, Callable[[Path], Callable[[], Any]]] = {
    "local variables of a generator": lambda _: _generator(),
    "what only a weak reference leads to": lambda _: _weakly_held(),
    "fields of an object that only a set holds": lambda _: _calling(
        {Counter()}, lambda each: [one.count() for one in each]
    ),
    "memory of a C extension": lambda _: _calling((ctypes.c_int * 1)(), lambda each: each.__setitem__(0, 1)),
    "position of an `itertools` iterator other than `count`": lambda _: _calling(itertools.cycle("ab"), next),
    "context variables": lambda _: lambda: CONTEXT.set(CONTEXT.get() + 1),
    "thread-local fields": lambda _: _thread_local(),
    "fields of an installed library's object": lambda _: _calling(
        logging.getLogger("a"), lambda each: each.setLevel(7)
    ),
    "fields of a descriptor in a class": lambda _: _calling(Owner(), lambda each: each.computed),
    "a file that is found by its name alone": lambda _: _unnamed_file(),
    "the middle of a container of more than 20 000 elements": lambda _: _long_list(),
    "what is more than 40 steps away": lambda _: _chain(),
    "elements of an array of objects": lambda _: _calling(
        np.array([[], None], dtype=object), lambda each: each[0].append(1)
    ),
    "arrays that are mapped from a file": _mapped,
    "files": _file,
    "hooks of a graph's nodes": lambda _: _node_of_a_graph(),
}


@pytest.mark.parametrize("limit", NOT_SEEN)
def test_a_limit_is_one(limit: str, tmp_path: Path) -> None:
    """The step changes something, and nothing is seen; where that gets better, the row goes."""
    step = NOT_SEEN[limit](tmp_path)
    before = observed(step=step)
    step()
    assert changes(before.fields, observed(step=step).fields) == []


def test_every_limit_is_documented() -> None:
    """The page's table has these rows, and no other."""
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    table = rows[rows.index("not seen") + 2 :]
    assert table[: len(NOT_SEEN)] == list(NOT_SEEN)
