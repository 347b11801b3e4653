"""Entering all guards at once: order, errors at every point, and what is said of them."""

from __future__ import annotations

from contextlib import contextmanager, suppress

import pytest
import torch
from case import alone, call_of

from pp_free_warmup import guards
from pp_free_warmup.errors import RestoreFailed
from pp_free_warmup.guards import GUARDS, guarded


@pytest.fixture
def call(monkeypatch):
    """A plain call, with only the guards that a test gives."""
    monkeypatch.setattr(guards, "GUARDS", ())
    return call_of(torch.nn.Linear(1, 1))


def logging_guard(name, log, *, at_entry=None, at_exit=None):
    """Make a guard that logs, and raises where it is told to."""

    @contextmanager
    def guard(call):
        log.append(f"+{name}")
        if at_entry is not None:
            raise at_entry
        try:
            yield
        finally:
            log.append(f"-{name}")
            if at_exit is not None:
                raise at_exit

    guard.__name__ = name
    return guard


def test_guards_are_left_in_reverse_order(call):
    """Whoever saved first puts back last."""
    log = []
    with guarded(call, [logging_guard(name, log) for name in "abc"]):
        log.append("block")

    assert log == ["+a", "+b", "+c", "block", "-c", "-b", "-a"]


def test_the_users_guards_come_after_the_librarys(monkeypatch):
    """They are restored before them, and so see the state that the library still holds."""
    log = []
    monkeypatch.setattr(guards, "GUARDS", (logging_guard("ours", log),))
    with guarded(call_of(torch.nn.Linear(1, 1)), iter([logging_guard("theirs", log)])):
        pass

    assert log == ["+ours", "+theirs", "-theirs", "-ours"]


def test_a_guard_that_cannot_save_undoes_those_before_it(call):
    """Its error comes out as it is; the block never runs."""
    log, error = [], ValueError("cannot save")
    entering = [logging_guard("a", log), logging_guard("b", log, at_entry=error), logging_guard("c", log)]
    with pytest.raises(ValueError, match="cannot save") as raised, guarded(call, entering):
        log.append("block")

    assert raised.value is error
    assert log == ["+a", "+b", "-a"]


@pytest.mark.parametrize("error", [KeyError("block"), KeyboardInterrupt(), StopIteration(), GeneratorExit()])
def test_an_error_of_the_block_comes_out_once_all_is_put_back(call, error):
    """Whatever its kind."""
    log = []
    with pytest.raises(type(error)) as raised, guarded(call, [logging_guard("a", log), logging_guard("b", log)]):
        raise error

    assert raised.value is error
    assert log == ["+a", "+b", "-b", "-a"]


def test_no_guard_can_swallow_an_error_of_the_block(call):
    """A guard that suppresses would let a failed pass look like a good one."""
    with pytest.raises(KeyError), guarded(call, [lambda call: suppress(KeyError)]):
        raise KeyError


def test_every_other_guard_still_restores(call):
    """Two fail, all are left, and the one error names both and its process."""
    log = []
    failing = [
        logging_guard("first", log),
        logging_guard("second", log, at_exit=ValueError("no room")),
        logging_guard("third", log, at_exit=KeyboardInterrupt()),
        logging_guard("fourth", log),
    ]
    with pytest.raises(RestoreFailed) as raised, guarded(call, failing):
        pass

    assert log[4:] == ["-fourth", "-third", "-second", "-first"]
    assert str(raised.value) == (
        "The warmup ran, but on this process not all could be put back: guards 'third', 'second'.\n"
        "Found: third: KeyboardInterrupt; second: ValueError: no room.\n"
        "Why it matters: The model's state on this process is unknown; training from here could silently differ.\n"
        "What to do: Stop this run. Start it again with PP_FREE_WARMUP=0 and report the cause shown above."
    )
    assert isinstance(raised.value.__cause__, KeyboardInterrupt)


def test_a_failed_restore_names_its_global_rank(call):
    """Where there are ranks."""
    with alone(), pytest.raises(RestoreFailed) as raised, guarded(call, [logging_guard("g", [], at_exit=ValueError())]):
        pass

    assert raised.value.wrong == "The warmup ran, but on rank 0 not all could be put back: guard 'g'."
    assert raised.value.found == "g: ValueError."


def test_a_failed_restore_keeps_the_error_of_the_block(call):
    """Both are in the traceback: the failure is the cause, the block's error its context."""
    block, failure = KeyError("block"), ValueError("restore")
    with pytest.raises(RestoreFailed) as raised, guarded(call, [logging_guard("g", [], at_exit=failure)]):
        raise block

    assert raised.value.__cause__ is failure
    assert failure.__context__ is block
    assert raised.value.__context__ is block


def test_a_guard_that_cannot_save_while_another_cannot_put_back(call):
    """The state is unknown then, which is the graver of the two."""
    entry, restore = OSError("save"), ValueError("restore")
    entering = [logging_guard("a", [], at_exit=restore), logging_guard("b", [], at_entry=entry)]
    with pytest.raises(RestoreFailed) as raised, guarded(call, entering):
        pass

    assert raised.value.__cause__ is restore
    assert restore.__context__ is entry


def test_a_guard_without_a_name_is_named_by_what_it_is(call):
    """Partial functions and objects may be guards."""

    class Guard:
        def __call__(self, call):
            return logging_guard("inner", [], at_exit=ValueError())(call)

        def __repr__(self):
            return "<my guard>"

    with pytest.raises(RestoreFailed, match="guard '<my guard>'"), guarded(call, [Guard()]):
        pass


def test_entering_in_an_error_handler_is_no_error(call):
    """An error that somebody else is handling is not the block's."""
    seen = []

    @contextmanager
    def guard(call):
        try:
            yield
            seen.append("no error")
        except LookupError:
            seen.append("error")
            raise

    try:
        raise LookupError
    except LookupError:
        with guarded(call, [guard]):
            pass

    assert seen == ["no error"]


def test_all_guards_together_leave_a_plain_model_alone():
    """In a process where most features are absent."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with guarded(call_of(model)):
        model(torch.rand(4, 2)).sum().backward()

    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4
    assert torch.equal(torch.get_rng_state(), state)
    assert len(GUARDS) == len(set(GUARDS))
