"""`warm_first_call`: the same warmup as a decorator, of a schedule or of a function that calls one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch
import wrapt

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import _patch
from pp_free_warmup._warmup import PipelineWarmup, pipeline_warmup
from pp_free_warmup.errors import UnsupportedSetup

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Warmed(Protocol[P, R_co]):
    """What a type checker sees: the function as it was, and the handle of its warmup."""

    @property
    def warmup(self) -> PipelineWarmup:
        """The handle of the decorated function; its ``report`` tells what happened."""

    def __call__(self, *args: P.args, **keywords: P.kwargs) -> R_co:
        """Call the function."""

    def __get__(self, instance: Any, owner: Any = None, /) -> Any:
        """Bind the function, where it is a method."""


class _Bound(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    @property
    def warmup(self) -> PipelineWarmup:
        """The handle of the decorated function; its ``report`` tells what happened."""
        return self._self_parent.warmup  # type: ignore[no-any-return]


class _Warmed(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A callable object or a bound method whose first pipeline-parallel step is warmed, with all its attributes."""

    __bound_function_wrapper__ = _Bound

    def __init__(self, function: Callable[..., Any], warmup: PipelineWarmup) -> None:
        run = _runner(function)
        super().__init__(function, lambda function, _, args, keywords: run(function, warmup, args, keywords))
        self._self_warmup = warmup

    @property
    def warmup(self) -> PipelineWarmup:
        """The handle of the decorated function; its ``report`` tells what happened."""
        return self._self_warmup

    def __copy__(self) -> _Warmed:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Warmed:
        return self  # as a plain function

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _Warmed, (self.__wrapped__, self._self_warmup)


@overload
def warm_first_call(fn: Callable[P, R_co], /, **keywords: Any) -> Warmed[P, R_co]: ...


@overload
def warm_first_call(fn: None = None, /, **keywords: Any) -> Callable[[Callable[P, R_co]], Warmed[P, R_co]]: ...


def warm_first_call(fn: Any = None, /, **keywords: Any) -> Any:
    """Warm the pipeline the first time *fn* is called: a schedule, or a function that calls one inside.

    A schedule fetched before any `pipeline_warmup` block is reached only this way. A function of
    one's own runs inside a block; schedules among its arguments (Megatron's ``train_step``) are
    warmed too. A ``functools.partial`` and a wrapper that keeps the schedule as
    ``forward_backward_func`` (Megatron's FullCudaGraphWrapper) are looked through.

    Args:
        fn: The function; left out when the decorator is used with parentheses.
        **keywords: As for `pipeline_warmup`.

    Returns:
        The function with its name, signature and doc, and ``.warmup`` for the report.

    Raises:
        UnsupportedSetup: *fn* is async, a generator, a class or not callable; or a keyword is wrong.

    Example:
        >>> @warm_first_call
        ... def train_step(batch):
        ...     "One step."
        >>> train_step.__name__, train_step.__doc__
        ('train_step', 'One step.')
    """
    warmup = pipeline_warmup(**keywords)  # a wrong keyword is reported where it stands, not at the first call
    if fn is None:
        return functools.partial(warm_first_call, **keywords)
    warmup.depth += 2  # the call of the function, and `_as_step`, lie between the user's line and the block's end
    return _dressed(fn, warmup)


def _dressed(fn: Any, warmup: PipelineWarmup) -> Any:
    """Put the warmup around *fn*, or around what *fn* calls; ``warmup`` is its handle in every case."""
    if isinstance(fn, functools.partial):
        inner = functools.partial(_dressed(fn.func, warmup), *fn.args, **fn.keywords)
        inner.warmup = warmup  # type: ignore[attr-defined]
        return inner
    if keeps_a_schedule(fn):
        fn.forward_backward_func = _dressed(fn.forward_backward_func, warmup)
        fn.warmup = warmup
        return fn
    _refuse_what_is_no_function(fn)
    if isinstance(fn, (classmethod, staticmethod)):
        outer = type(fn)(_dressed(fn.__func__, warmup))
        outer.warmup = warmup  # type: ignore[union-attr]
        return outer
    return _plain(fn, warmup) if inspect.isfunction(fn) else _Warmed(fn, warmup)


def _plain(fn: Callable[..., Any], warmup: PipelineWarmup) -> Callable[..., Any]:
    """Wrap a function in a plain function: pickled by name, or by value with all that belongs to it (Ray's actors)."""
    run = _runner(fn)

    @functools.wraps(fn)
    def warmed(*args: Any, **keywords: Any) -> Any:
        return run(fn, warmup, args, keywords)

    warmed.warmup = warmup  # type: ignore[attr-defined]
    return warmed


def _with_schedules_warmed(value: Any, warmup: PipelineWarmup) -> Any:
    """Return an argument of a step as it is, unless it is a schedule, or a partial or keeper of one."""
    if is_schedule(value):
        return value if getattr(value, "warmup", None) is warmup else _dressed(value, warmup)
    if isinstance(value, functools.partial):
        inner = _with_schedules_warmed(value.func, warmup)
        return value if inner is value.func else functools.partial(inner, *value.args, **value.keywords)
    if keeps_a_schedule(value):
        value.forward_backward_func = _with_schedules_warmed(value.forward_backward_func, warmup)
    return value


def keeps_a_schedule(value: Any) -> bool:
    """Tell whether this is a wrapper like Megatron's FullCudaGraphWrapper and PagedStashRunner."""
    return callable(value) and getattr(value, "__dict__", {}).get("forward_backward_func") is not None


def is_schedule(function: Any) -> bool:
    """Tell whether this is a pipeline schedule: one of Megatron's own, or of the same required keywords."""
    if not callable(function) or isinstance(function, (type, torch.nn.Module)):
        return False
    if _patch.original_of(function) is not None:
        return True
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature is no schedule
        return False
    required = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
    return megatron.REQUIRED_KEYWORDS <= required


Runner = Callable[[Callable[..., Any], PipelineWarmup, tuple[Any, ...], dict[str, Any]], Any]


def _runner(fn: Callable[..., Any]) -> Runner:
    return _as_schedule if is_schedule(fn) else _as_step


def _as_schedule(
    schedule: Callable[..., Any], warmup: PipelineWarmup, args: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    _patch.refuse_positional(args)
    return warmup.run(schedule, keywords) if warmup.takes(keywords) else schedule(**keywords)


def _as_step(step: Callable[..., Any], warmup: PipelineWarmup, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    with warmup:
        return step(
            *(_with_schedules_warmed(value, warmup) for value in args),
            **{name: _with_schedules_warmed(value, warmup) for name, value in keywords.items()},
        )


def _refuse_what_is_no_function(fn: Any) -> None:
    target = getattr(fn, "__func__", fn)  # what a staticmethod or classmethod object holds
    call = getattr(type(target), "__call__", None)  # noqa: B004 - to look at it, not to call it
    later = "Its body runs after the call has returned, outside the block in which schedules are warmed."
    never = "No call of it runs a pipeline schedule that could be warmed."
    if any(map(inspect.iscoroutinefunction, (target, call))) or inspect.isasyncgenfunction(target):
        kind, matters = "an async function", later
    elif inspect.isgeneratorfunction(target):
        kind, matters = "a generator function", later
    elif isinstance(target, type):
        kind, matters = "a class", never
    elif not callable(target):
        kind, matters = f"a {type(fn).__name__}", never
    else:
        return
    raise UnsupportedSetup(
        f"@warm_first_call cannot warm {getattr(target, '__qualname__', repr(fn))}.",
        found=f"{kind}; expected a plain function, a method or a pipeline schedule.",
        matters=matters,
        do="Decorate the plain function that calls the schedule, or open a pipeline_warmup block inside.",
    )
