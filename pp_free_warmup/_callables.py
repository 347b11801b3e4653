"""What a callable holds on to: its object, its arguments, its closure, its globals.

Nothing is called on the way, and no property and no ``__getattr__`` runs: values are read
where they are stored, so that a callable of any kind can be looked at, a lazy proxy too.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
STORED = (types.MemberDescriptorType, types.GetSetDescriptorType)
EMPTY = object()
# What functools.wraps stores, and what wrapt's proxies do.
WRAPPED = {"__wrapped__": "wrapped", "_self_wrapper": "wrapper", "_self_instance": "self", "_self_parent": "parent"}


class Held(NamedTuple):
    """One thing that a callable holds.

    Attributes:
        name: What it is to the callable, such as ``"closure count"``.
        value: The thing itself; it may be a callable that holds more.
        cell: The cell of a closure's name, through which another value can be bound to it; else None.
    """

    name: str
    value: Any
    cell: types.CellType | None = None


def held_by(callable_: Any) -> Iterator[Held]:
    """Iterate over everything that a callable holds, one level deep.

    Args:
        callable_: A function, bound method, partial, wrapper, callable object, or anything else.

    Yields:
        What stands behind it (``self``, ``function``, ``wrapped``, a callable ``object`` itself),
        a partial's arguments, a closure's names that are bound, defaults, function attributes,
        and the globals that a function's code or the code inside it names. Ask again with a value
        that is itself a callable; cycles are the caller's business.

    Example:
        >>> def counting(count):
        ...     return lambda: count.append(1)
        >>> [held.name for held in held_by(counting([]))]
        ['closure count']
    """
    kind = type(callable_)  # not isinstance: a proxy's __class__ is that of what it wraps
    if issubclass(kind, types.FunctionType):
        yield from _held_by_function(callable_)
    elif issubclass(kind, METHODS):
        yield from _behind({"self": callable_.__self__, "function": stored(callable_, "__func__")})
    elif issubclass(kind, functools.partial):
        yield from _named("argument", dict(enumerate(stored(callable_, "args"))))
        yield from _named("argument", stored(callable_, "keywords"))
        yield from _named("attribute", _fields(callable_))
        yield from _behind({"function": stored(callable_, "func")})
    else:
        function = next((base.__dict__["__call__"] for base in kind.__mro__ if "__call__" in base.__dict__), None)
        in_python = not isinstance(function, types.WrapperDescriptorType)
        yield from _behind({"object": callable_, "function": function if in_python else None})
    yield from _behind({name: stored(callable_, key) for key, name in WRAPPED.items()})


def stored(owner: Any, name: str) -> Any:
    """Return what *owner* itself stores under *name*, in ``__dict__`` or a slot, or None; run no code of its class."""
    fields = _slot(owner, "__dict__")
    return fields[name] if isinstance(fields, dict) and name in fields else _slot(owner, name)


def own_fields(owner: Any) -> dict[str, Any]:
    """Return what *owner* itself stores, in ``__dict__`` and in slots; run no code of its class."""
    fields = _slot(owner, "__dict__")
    fields = dict(fields) if isinstance(fields, dict) else {}
    for base in type(owner).__mro__:
        if "__slots__" in base.__dict__:
            slots = [name for name, slot in base.__dict__.items() if isinstance(slot, types.MemberDescriptorType)]
            fields |= {name: value for name in slots if (value := _slot(owner, name, EMPTY)) is not EMPTY}
    return fields


def code_of(function: types.FunctionType) -> Iterator[types.CodeType]:
    """Iterate over a function's code and that of the functions and classes defined in it."""
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _slot(owner: Any, name: str, absent: Any = None) -> Any:
    for base in type(owner).__mro__:
        if isinstance(base.__dict__.get(name), STORED):
            try:
                return base.__dict__[name].__get__(owner)
            except Exception:  # noqa: BLE001 - an empty slot, or a proxy that stands for nothing yet
                return absent
    return absent


def _held_by_function(function: types.FunctionType) -> Iterator[Held]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield Held(f"closure {name}", cell.cell_contents, cell)
        except ValueError:  # a name that is not bound yet
            continue
    defaults = function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    yield from _named("default", dict(zip(code.co_varnames[first:], defaults, strict=False)))
    yield from _named("default", function.__kwdefaults__ or {})
    yield from _named("attribute", _fields(function))
    names = {name for each in code_of(function) for name in each.co_names} & function.__globals__.keys()
    yield from _named("global", {name: function.__globals__[name] for name in sorted(names)})


def _fields(owner: Any) -> dict[str, Any]:
    """Return the attributes that were set on a function or partial, what it wraps apart."""
    return {name: value for name, value in (_slot(owner, "__dict__") or {}).items() if name not in WRAPPED}


def _named(kind: str, values: dict[Any, Any]) -> Iterator[Held]:
    yield from (Held(f"{kind} {name}", value) for name, value in values.items())


def _behind(values: dict[str, Any]) -> Iterator[Held]:
    yield from (Held(name, value) for name, value in values.items() if value is not None)
