"""Guards in any order and nesting, with an error at any point: afterwards everything is as before."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from functools import cache

import pytest
from case import differences, seen
from cases import CASES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pp_free_warmup import guards
from pp_free_warmup.errors import RestoreFailed
from pp_free_warmup.guards import guarded
from pp_free_warmup.testing import cuda_on_cpu

few = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    derandomize=True,
)


class InjectedError(Exception):
    """Raised where a test puts it."""


@contextmanager
def one_world():
    """Have the "GPU" before any case is built: entering it hides Transformer Engine, stand-ins for it included."""
    with cuda_on_cpu(), ExitStack() as stack:
        yield stack


@cache
def pretends_an_engine(case):
    """Tell whether a case puts a stand-in for Transformer Engine in place; two would be each other's."""
    with one_world() as stack:
        case.build(stack)
        return any(name.startswith("transformer_engine") and sys.modules[name] for name in sys.modules)


some_cases = st.lists(st.sampled_from(CASES), min_size=1, max_size=6, unique_by=lambda case: case.guard).filter(
    lambda cases: sum(map(pretends_an_engine, cases)) <= 1
)


def _for_its_own_call(case, call):
    """Make a guard that guards the case's own call, whichever it is entered with."""
    return lambda _: case.guard(call)


@few
@given(cases=some_cases, steps=st.data())
def test_any_guards_in_any_order_put_everything_back(cases, steps):
    """Some guards, entered in some order; disturbances of their states, in some order; an error or none."""
    disturbed = steps.draw(st.lists(st.sampled_from(cases), min_size=1, max_size=4))
    raised_at = steps.draw(st.none() | st.integers(0, len(disturbed) - 1))
    with one_world() as stack:
        calls = {str(case): case.build(stack) for case in cases}
        before = {name: seen(case, calls[name]) for name, case in zip(calls, cases, strict=True)}
        with ExitStack() as entered, pytest.raises(InjectedError) if raised_at is not None else ExitStack():
            for case in cases:
                entered.enter_context(case.guard(calls[str(case)]))
            for number, case in enumerate(disturbed):
                case.disturb(calls[str(case)])
                if number == raised_at:
                    raise InjectedError
        entered.close()

        for name, case in zip(calls, cases, strict=True):
            assert differences(before[name], seen(case, calls[name])) == [], f"{name} after {[*map(str, disturbed)]}"


@few
@given(cases=some_cases, depths=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_any_nesting_puts_back_what_each_level_found(cases, depths):
    """Guards entered again inside themselves and each other."""
    with one_world() as stack:
        calls = {str(case): case.build(stack) for case in cases}

        def observed():
            return {str(case): seen(case, calls[str(case)]) for case in cases}

        def level(remaining):
            before = observed()
            with guarded_by(cases, calls):
                for case in cases[: remaining[0] + 1]:
                    case.disturb(calls[str(case)])
                if remaining[1:]:
                    level(remaining[1:])
            assert differences(before, observed()) == []

        level(depths)


@contextmanager
def guarded_by(cases, calls):
    """Enter the cases' guards through the library's own `guarded`, in this order and without the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "GUARDS", ())
        with guarded(None, [_for_its_own_call(case, calls[str(case)]) for case in cases]):
            patch.undo()
            yield


@few
@given(cases=some_cases, at=st.integers(0, 6), where=st.sampled_from(["entry", "block", "exit"]))
def test_an_error_at_any_point_puts_everything_else_back(cases, at, where):
    """A guard among the others that cannot save, or cannot put back; or a block that raises."""

    @contextmanager
    def broken(call):
        if where == "entry":
            raise InjectedError
        yield
        raise InjectedError

    with one_world() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "GUARDS", ())
        calls = {str(case): case.build(stack) for case in cases}
        before = {str(case): seen(case, calls[str(case)]) for case in cases}
        order = [_for_its_own_call(case, calls[str(case)]) for case in cases]
        if where != "block":
            order.insert(min(at, len(order)), broken)
        with pytest.raises(RestoreFailed if where == "exit" else InjectedError), guarded(None, order):
            assert where != "entry"
            for case in cases:
                case.disturb(calls[str(case)])
            if where == "block":
                raise InjectedError

        assert differences(before, {str(case): seen(case, calls[str(case)]) for case in cases}) == []


def test_the_properties_can_fail():
    """With one guard taken away, its disturbance is found."""
    with ExitStack() as stack:
        case = CASES[0]
        call = case.build(stack)
        before = seen(case, call)
        case.disturb(call)

        assert differences(before, seen(case, call)) != []
