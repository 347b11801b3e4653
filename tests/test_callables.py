"""Whatever a callable holds is found one level deep, and nothing of it is run to find it."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
import wrapt

from pp_free_warmup._callables import held_by

COUNTS: list[int] = []
UNUSED: list[int] = []


def _found(callable_: Any) -> dict[str, Any]:
    """Return what is held by name, Python's own things apart."""
    return {name: value for name, value, _ in held_by(callable_)}


class Trainer:
    """Has a method and can be called itself."""

    def step(self) -> None:
        """Count in a global."""
        COUNTS.append(1)

    def __call__(self) -> None:
        COUNTS.append(1)


def _closing_over(value: Any) -> Any:
    return lambda: value


def _with_defaults(first: Any, second: Any = COUNTS, *, third: Any = UNUSED) -> None: ...


def _inner_functions() -> Any:
    class Inner:
        def act(self) -> Any:
            return [lambda: COUNTS for _ in ()]

    return Inner


@functools.wraps(_inner_functions)
def _wrapping() -> None: ...


@wrapt.decorator
def _wrapper(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


def test_a_closure_is_held_with_its_cell() -> None:
    """The cell comes along, and another value can be bound through it."""
    callable_ = _closing_over(3)
    (held,) = held_by(callable_)

    assert (held.name, held.value) == ("closure value", 3)
    held.cell.cell_contents = 4
    assert callable_() == 4


def test_a_closure_may_hold_none() -> None:
    """A name bound to None is bound."""
    assert _found(_closing_over(None)) == {"closure value": None}


def test_an_empty_cell_is_passed_over() -> None:
    """A name that is not bound yet is no value."""

    def outer() -> Any:
        def inner() -> Any:
            return later

        found = _found(inner)
        later = 1
        return found, later

    assert outer() == ({}, 1)


def test_a_method_holds_its_object_and_its_function() -> None:
    """Both can be asked further; the function names the globals."""
    trainer = Trainer()
    assert _found(trainer.step) == {"self": trainer, "function": Trainer.step}
    assert _found(Trainer.step) == {"global COUNTS": COUNTS}


def test_a_callable_object_holds_itself_and_its_calls_function() -> None:
    """Fields are the object's, globals those of its type's ``__call__``."""
    trainer = Trainer()
    assert _found(trainer) == {"object": trainer, "function": Trainer.__call__}


def test_a_partial_holds_arguments_and_function() -> None:
    """By number and by name, and the attributes that were set on it."""
    callable_ = functools.partial(_with_defaults, COUNTS, third=7)
    callable_.calls = 0  # type: ignore[attr-defined]
    assert _found(callable_) == {
        "argument 0": COUNTS,
        "argument third": 7,
        "attribute calls": 0,
        "function": _with_defaults,
    }


def test_defaults_are_held_by_their_names() -> None:
    """Keyword-only ones too."""
    assert _found(_with_defaults) == {"default second": COUNTS, "default third": UNUSED}


def test_attributes_of_a_function_are_held() -> None:
    """What was set on it is found by name."""
    callable_ = _closing_over(1)
    callable_.calls = 2
    assert _found(callable_) == {"closure value": 1, "attribute calls": 2}


def test_globals_named_by_nested_code_are_held() -> None:
    """A comprehension in a method of a class in a function is code of that function; other globals are not."""
    found = _found(_inner_functions)
    assert found["global COUNTS"] is COUNTS
    assert "global UNUSED" not in found


def test_modules_and_classes_among_globals_are_held() -> None:
    """They are given out as they are: whoever asks decides."""
    found = _found(lambda: (torch.ones(1), Trainer))
    assert found == {"global torch": torch, "global Trainer": Trainer}


def test_what_functools_wraps_is_held() -> None:
    """The wrapped function stands behind its wrapper, and is no attribute of it."""
    assert _found(_wrapping) == {"wrapped": _inner_functions}


def test_what_wrapt_wraps_is_held() -> None:
    """A proxy that claims to be a function leads to the function, and to the wrapper's own."""
    callable_ = _wrapper(_inner_functions)
    found = _found(callable_)

    assert isinstance(callable_, types.FunctionType)
    assert found["wrapped"] is _inner_functions
    assert isinstance(found["wrapper"], types.FunctionType)


def test_what_wrapt_binds_is_held() -> None:
    """A bound proxy leads to its object."""

    class Wrapped:
        @_wrapper
        def step(self) -> None: ...

    owner = Wrapped()
    found = _found(owner.step)
    assert found["self"] is owner
    assert found["wrapped"].__func__ is Wrapped.step.__wrapped__


class Raising:
    """Raises at everything that is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __call__(self) -> None: ...


class Lazy:
    """Has a property where a wrapper would store what it wraps."""

    @property
    def __wrapped__(self) -> Any:
        raise AssertionError("a property ran")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"__getattr__({name!r}) ran")

    def __call__(self) -> None: ...


class Slotted:
    """Has a slot where a wrapper stores what it wraps, and leaves it empty."""

    __slots__ = ("__wrapped__",)

    def __call__(self) -> None: ...


ODD = {
    "builtins": [len, "".join, [].append, str.join, "".__len__, torch.add, torch.ops.aten.add],
    "classes": [Trainer, type, types.FunctionType, Raising],
    "torch's own": [torch.nn.Linear(1, 1), torch.compile(_wrapping), torch.autograd.Function.apply],
    "functools'": [functools.lru_cache(_wrapping), functools.singledispatch(_wrapping), functools.partialmethod(len)],
    "descriptors": [staticmethod(_wrapping), property(_wrapping)],
    "objects that raise": [Raising(), Lazy(), Slotted(), wrapt.ObjectProxy(None)],
    "no callables": [None, 3],
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_callables_never_raise(kind: str) -> None:
    """Builtins, C functions, classes, proxies and objects that raise are looked at, or left, quietly."""
    for callable_ in ODD[kind]:
        assert all(isinstance(name, str) for name, _, _ in held_by(callable_))


def test_a_builtin_method_holds_its_object() -> None:
    """``list.append`` bound to a list leads to the list."""
    assert _found(COUNTS.append) == {"self": COUNTS}


def test_a_cache_holds_what_it_wraps() -> None:
    """``functools.lru_cache`` is no function, but wraps one."""
    assert _found(functools.lru_cache(_with_defaults))["wrapped"] is _with_defaults
