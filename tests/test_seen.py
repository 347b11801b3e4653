"""What a forward step may change is seen wherever it is: each place is a step of the walk, and so is each limit."""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import queue
import random
from array import array
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import another_file
import numpy as np
import pytest
import torch
import wrapt
from megatron.core import parallel_state
from torch.nn import Linear

from pp_free_warmup._trace import changes, observed


class Case(NamedTuple):
    """A forward step, its model and data, and what one call of it does."""

    step: Callable[..., Any]
    model: Any = None
    data: Any = None


def _left_by(case: Case) -> list[str]:
    """Call the step once, as a pass does, and return what is seen to have changed."""
    before = observed(case.model, None, case.step, case.data)
    case.step(case.data, case.model)
    return changes(before.fields, observed(case.model, None, case.step, case.data).fields)


COUNTS: dict[str, list[int]] = {"steps": []}
NAMESPACE = SimpleNamespace(steps=0)
ARGUMENTS = argparse.Namespace(steps=0)


class Calling:
    """A callable object."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, *_: Any) -> None:
        self.steps += 1

    def count(self, *_: Any) -> None:
        """Count in a field."""
        self.steps += 1


class Holding:
    """Has its counter in a namespace."""

    def __init__(self) -> None:
        self.args = SimpleNamespace(steps=0)

    def count(self, *_: Any) -> None:
        """Count in the namespace."""
        self.args.steps += 1


class Slotted:
    """Keeps its field in a slot, under a private name."""

    __slots__ = ("__steps",)

    def __init__(self) -> None:
        self.__steps = 0

    def count(self, *_: Any) -> None:
        """Count in the slot."""
        self.__steps += 1


class Derived(another_file.Base):
    """Inherits its method from another file."""


CALLING = Calling()


def _into(holder: Any) -> Callable[..., Any]:
    """Return a step that counts in the field of what it closes over."""

    def step(*_: Any) -> None:
        holder.steps += 1

    return step


def _adding(container: Any, add: Callable[[Any], Any]) -> Case:
    return Case(lambda *_: add(container))


def _in_global_namespace(*_: Any) -> None:
    NAMESPACE.steps += 1


def _in_global_arguments(*_: Any) -> None:
    ARGUMENTS.steps += 1


def _in_global_lists(*_: Any) -> None:
    COUNTS["steps"].append(1)


def _in_global_callable(*_: Any) -> None:
    CALLING()


def _in_own_attribute(*_: Any) -> None:
    _in_own_attribute.steps += 1  # type: ignore[attr-defined]


_in_own_attribute.steps = 0  # type: ignore[attr-defined]


def _in_default(*_: Any, counts: list[int] = []) -> None:  # noqa: B006 - what is being tested
    counts.append(1)


def _importing_inside(*_: Any) -> None:
    from further_file import count_further

    count_further()


def _in_environment(*_: Any) -> None:
    os.environ["STEPS"] = os.environ.get("STEPS", "") + "1"


def _wrapped(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def outer(*arguments: Any) -> Any:
        return outer.__wrapped__(*arguments)  # type: ignore[attr-defined]

    return outer


@wrapt.decorator
def _proxy(wrapped: Any, _instance: Any, arguments: Any, _named: Any) -> Any:
    return wrapped(*arguments)


def _local_class() -> Case:
    class Local:
        steps = 0

    local = Local()

    def step(*_: Any) -> None:
        type(local).steps += 1

    return Case(step)


def _rebinding() -> Case:
    steps = 0

    def step(*_: Any) -> None:
        nonlocal steps
        steps += 1

    return Case(step)


def _with_module(**fields: Any) -> Any:
    """Return a model that holds the fields."""
    model = Linear(1, 1)
    for name, value in fields.items():
        setattr(model, name, value)
    return model


def _run(_data: Any, model: Any) -> None:
    model(torch.ones(1, 1, requires_grad=True)).sum().backward()


def _hooked(register: str, hook: Callable[..., Any]) -> Case:
    """Return a step that runs a model with a hook; the gradients are there before."""
    model = Linear(1, 1)
    model.requires_grad_(requires_grad=False)
    getattr(model, register)(hook)
    return Case(_run, model)


def _counting(counts: list[int]) -> Callable[..., None]:
    """Return a hook that counts in what it closes over."""

    def hook(*_: Any) -> None:
        counts.append(1)

    return hook


class Hooks:
    """An object whose method is a hook."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self, *_: Any) -> None:
        """Count in a field."""
        self.calls += 1


def _append_to(counts: list[int], *_: Any) -> None:
    counts.append(1)


class Items:
    """An iterator with fields, that the forward step also writes to."""

    def __init__(self) -> None:
        self.seen = 0
        self.log: list[int] = []

    def __next__(self) -> int:
        return 1


def _in_iterator(data: Items, _model: Any) -> None:
    data.seen += 1


def _in_iterators_list(data: Items, _model: Any) -> None:
    data.log.append(1)


def _of_parameter() -> Case:
    model = Linear(1, 1)
    counts: list[int] = []
    model.weight.register_post_accumulate_grad_hook(_counting(counts))
    model.weight.grad = torch.zeros(1, 1)
    return Case(_run, model)


class LogList(list):  # type: ignore[type-arg]
    """A list with a field, and its own opinion about its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def __iter__(self) -> Any:
        raise AssertionError("a list's own __iter__ was called")


SEEN: dict[str, tuple[Callable[[], Case], str]] = {
    "namespace": (lambda: Case(_in_global_namespace), "test_seen:NAMESPACE.steps: 0 -> 1"),
    "arguments": (lambda: Case(_in_global_arguments), "test_seen:ARGUMENTS.steps: 0 -> 1"),
    "dict of lists": (lambda: Case(_in_global_lists), "test_seen:COUNTS['steps'][0]: absent -> 1"),
    "callable object in a global": (lambda: Case(_in_global_callable), "test_seen:CALLING.steps: 0 -> 1"),
    "function attribute": (lambda: Case(_in_own_attribute), "forward_step_func attribute steps: 0 -> 1"),
    "mutable default": (lambda: Case(_in_default), "forward_step_func default counts[0]: absent -> 1"),
    "rebound nonlocal": (_rebinding, "forward_step_func closure steps: 0 -> 1"),
    "namespace in a closure": (lambda: Case(_into(SimpleNamespace(steps=0))), "closure holder.steps: 0 -> 1"),
    "callable object": (lambda: Case(Calling()), "forward_step_func.steps: 0 -> 1"),
    "method": (lambda: Case(Calling().count), "forward_step_func self.steps: 0 -> 1"),
    "namespace of a method's object": (lambda: Case(Holding().count), "forward_step_func self.args.steps: 0 -> 1"),
    "slot": (lambda: Case(Slotted().count), "forward_step_func self._Slotted__steps: 0 -> 1"),
    "method of a partial": (lambda: Case(functools.partial(Calling().count, 1)), "function self.steps: 0 -> 1"),
    "partial argument": (
        lambda: Case(functools.partial(_append_to, [])),
        "forward_step_func argument 0[0]: absent -> 1",
    ),
    "object in a partial": (
        lambda: Case(functools.partial(_in_field_of, meter=Calling())),
        "forward_step_func argument meter.steps: 0 -> 1",
    ),
    "closure behind functools.wraps": (
        lambda: Case(_wrapped(_into(Calling()))),
        "wrapped closure holder.steps: 0 -> 1",
    ),
    "method behind functools.wraps": (lambda: Case(_wrapped(Calling().count)), "wrapped self.steps: 0 -> 1"),
    "method behind wrapt": (lambda: Case(_proxy(Calling().count)), "wrapped self.steps: 0 -> 1"),
    "behind a cache": (
        lambda: Case(_passing_on(functools.lru_cache(_into(Calling())))),
        "closure holder.steps: 0 -> 1",
    ),
    "class attribute of a local class": (_local_class, "<locals>.Local.steps: 0 -> 1"),
    "method from another file": (lambda: Case(Derived().step), "another_file:SEEN["),
    "function from another file": (lambda: Case(another_file.count_here), "another_file:SEEN["),
    "state in another file": (lambda: Case(another_file.count_in_state), "STATE['lengths'][0]: absent -> 1"),
    "a file further on": (lambda: Case(another_file.count_there), "further_file:CALLS['all']: "),
    "a file imported inside": (lambda: Case(_importing_inside), "further_file:CALLS['all']: "),
    "environment": (lambda: Case(_in_environment), "environ[b'STEPS']"),
    "queue": (lambda: _adding(queue.Queue(), lambda each: each.put(1)), "container.queue[0]: absent -> 1"),
    "simple queue": (lambda: _adding(queue.SimpleQueue(), lambda each: each.put(1)), "container: 0 in"),
    "count": (lambda: _adding(itertools.count(), next), "container: count(0)"),
    "list": (lambda: _adding([], lambda each: each.append(1)), "container[0]: absent -> 1"),
    "deque": (lambda: _adding(deque(), lambda each: each.append(1)), "container[0]: absent -> 1"),
    "set": (lambda: _adding(set(), lambda each: each.add(1)), "of ['1']"),
    "ordered dict": (
        lambda: _adding(OrderedDict(a=1, b=2), lambda each: each.popitem()),
        "container['b']: 2 -> absent",
    ),
    "defaultdict": (lambda: _adding(defaultdict(list), lambda each: each["new"].append(1)), "container['new'][0]"),
    "counter": (lambda: _adding(Counter(), lambda each: each.update("a")), "container['a']: absent -> 1"),
    "user dict": (lambda: _adding(UserDict(), lambda each: each.update(a=1)), "container.data['a']: absent -> 1"),
    "field of a list": (lambda: Case(_into(LogList())), "holder.steps: 0 -> 1"),
    "array": (lambda: _adding(array("i", [0]), lambda each: each.append(1)), "closure container"),
    "bytearray": (lambda: _adding(bytearray(1), lambda each: each.append(1)), "closure container"),
    "numpy array": (lambda: _adding(np.zeros(1), lambda each: each.fill(1)), "closure container"),
    "numpy generator": (lambda: _adding(np.random.default_rng(1), lambda each: each.random()), "closure container"),
    "numpy's old generator": (lambda: _adding(np.random.RandomState(1), lambda each: each.rand()), "closure container"),
    "python generator": (lambda: _adding(random.Random(1), lambda each: each.random()), "closure container"),
    "torch generator": (
        lambda: _adding(torch.Generator(), lambda each: torch.rand(1, generator=each)),
        "closure container",
    ),
    "tensor": (lambda: _adding(torch.zeros(1), lambda each: each.add_(1)), "closure container"),
    "namespace of a module": (
        lambda: Case(lambda _data, model: _into(model.args)(), _with_module(args=SimpleNamespace(steps=0))),
        "chunk0.args.steps: 0 -> 1",
    ),
    "function that a module holds": (
        lambda: Case(lambda _data, model: model.act(), _with_module(act=_into(Calling()))),
        "chunk0.act closure holder.steps: 0 -> 1",
    ),
    "forward hook, closure": (lambda: _hooked("register_forward_hook", _counting([])), "closure counts[0]"),
    "forward hook, method": (lambda: _hooked("register_forward_hook", Hooks().count), "self.calls: 0 -> 1"),
    "forward hook, partial": (
        lambda: _hooked("register_forward_hook", functools.partial(_append_to, [])),
        "argument 0[0]: absent -> 1",
    ),
    "pre-hook, method": (lambda: _hooked("register_forward_pre_hook", Hooks().count), "self.calls: 0 -> 1"),
    "backward hook, closure": (lambda: _hooked("register_full_backward_hook", _counting([])), "closure counts[0]"),
    "hook of a parameter": (_of_parameter, "chunk0.weight.grad_hooks"),
    "parameter through .data": (
        lambda: Case(lambda _data, model: model.weight.data.add_(1), Linear(1, 1)),
        "chunk0.weight: float32",
    ),
    "field of the iterator": (lambda: Case(_in_iterator, None, Items()), "data_iterator.seen: 0 -> 1"),
    "list of one of the iterators": (
        lambda: Case(lambda data, model: _in_iterators_list(data[0], model), None, [Items(), None]),
        "data_iterator[0].log[0]: absent -> 1",
    ),
}


def _in_field_of(*_: Any, meter: Any) -> None:
    meter.steps += 1


def _passing_on(inner: Callable[[], Any]) -> Callable[..., Any]:
    return lambda *_: inner()


@pytest.mark.parametrize("place", SEEN)
def test_a_change_is_seen_and_named(place: str) -> None:
    """Whatever holds the counter, its path is named."""
    make, path = SEEN[place]
    assert path in "\n".join(_left_by(make()))


@pytest.mark.parametrize("place", SEEN)
def test_looking_twice_sees_no_change(place: str) -> None:
    """A step that was not called has changed nothing: looking alone moves no counter and draws nothing."""
    case = SEEN[place][0]()
    before = observed(case.model, None, case.step, case.data)
    assert changes(before.fields, observed(case.model, None, case.step, case.data).fields) == []


class LazyMapping(OrderedDict):  # type: ignore[type-arg]
    """Loads what it is asked for, as transformers' mappings do: being looked at must not ask it."""

    def _load(self, *_: Any) -> Any:
        raise AssertionError("a mapping's own code ran")

    __getitem__ = __iter__ = keys = values = items = __len__ = __contains__ = __repr__ = __eq__ = _load  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class OwnMapping(Mapping):  # type: ignore[type-arg]
    """No builtin at all; its fields are looked at, it is not."""

    def __init__(self) -> None:
        self.steps = 0

    def _load(self, *_: Any) -> Any:
        raise AssertionError("a mapping's own code ran")

    __getitem__ = __iter__ = __len__ = keys = values = items = _load


LAZY: dict[str, Callable[[], Any]] = {"ordered dict": LazyMapping, "mapping": OwnMapping}


@pytest.mark.parametrize("kind", LAZY)
def test_a_lazy_mapping_in_a_file_of_megatrons_is_not_asked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries leave theirs among Megatron's globals; one that is iterated imports the whole library."""
    monkeypatch.setattr(parallel_state, "_LAZY", LAZY[kind](), raising=False)
    assert "megatron.core.parallel_state:_LAZY" in observed().fields


def _in_megatrons_namespace(*_: Any) -> None:
    parallel_state._ARGUMENTS.steps += 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [SimpleNamespace, argparse.Namespace])
def test_a_namespace_in_a_file_of_megatrons_is_seen(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM keeps its arguments and counters in one."""
    monkeypatch.setattr(parallel_state, "_ARGUMENTS", kind(steps=0), raising=False)
    path = "megatron.core.parallel_state:_ARGUMENTS.steps: 0 -> 1"
    assert path in "\n".join(_left_by(Case(_in_megatrons_namespace)))


class Unwilling:
    """Has a property, a ``__getattr__``, a ``__class__`` and a text that nobody may ask for."""

    def _refuse(self, *_: Any) -> Any:
        raise AssertionError("an object's own code ran")

    __getattr__ = __getattribute__ = __repr__ = __eq__ = __bool__ = __iter__ = __len__ = __dir__ = _refuse
    __class__ = property(_refuse)  # type: ignore[assignment]
    __hash__ = object.__hash__
    reading = property(_refuse)


class Level(int):
    """A number with its own text."""

    def __repr__(self) -> str:
        raise AssertionError("a number's own text was asked for")


FOREIGN: dict[str, Callable[[], Any]] = {
    "lazy mapping": LazyMapping,
    "mapping": OwnMapping,
    "unwilling object": Unwilling,
    "number": lambda: Level(3),
    "list": LogList,
    "in a set": lambda: {Unwilling(), Level(2)},
    "as a key": lambda: {Unwilling(): 1},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_nothing_of_the_callers_runs(kind: str) -> None:
    """Mappings are not iterated, properties not read, texts not asked for, in a closure and in a module."""
    foreign = FOREIGN[kind]()
    walk = observed(_with_module(held=[foreign]), None, lambda: foreign)
    assert "chunk0.held[0]" in walk.fields
    assert "forward_step_func closure foreign" in walk.fields


def test_a_lazy_mapping_is_looked_into() -> None:
    """What an ordered dict holds is read past its own methods."""
    lazy = LazyMapping()
    OrderedDict.__setitem__(lazy, "loaded", [1])
    assert observed(step=lambda: lazy).fields["forward_step_func closure lazy['loaded'][0]"] == "1"


def test_a_path_with_a_colon_is_no_files() -> None:
    """A change under a key that has a colon in it is one, whatever the key looks like."""
    steps = {"a:b": 0}
    assert changes({"x.d['a:b']": "0"}, {"x.d['a:b']": "1"}) != []
    assert "closure steps['a:b']: 0 -> 1" in "\n".join(_left_by(Case(lambda *_: steps.update({"a:b": 1}))))


def test_depth_is_no_recursion() -> None:
    """A list nested ten thousand deep is cut, and ends nothing."""
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]
    walk = observed(step=lambda: nested)
    assert len([path for path in walk.fields if path.startswith("forward_step_func closure nested")]) <= 41
