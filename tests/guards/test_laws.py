"""The laws that every guard obeys, run over all cases."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch
from case import Case, Communication, Same, alone, call_of, differences, identities, seen
from cases import CASES
from megatron.core.model_parallel_config import ModelParallelConfig

from pp_free_warmup.guards import GUARDS

every_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture
def stack():
    """Undo what a case's build leaves for later."""
    with ExitStack() as stack:
        yield stack


def _disturb(case, call):
    """Disturb, and make sure that it shows: a law over an unchanged state would hold for any guard."""
    before = seen(case, call)
    case.disturb(call)
    assert differences(before, seen(case, call)), f"{case}: disturb changed nothing that observe sees"


@every_case
def test_puts_back_what_the_block_changed(case, stack):
    """After the block everything is as it was before it, to the bit."""
    call = case.build(stack)
    before = seen(case, call)
    with case.guard(call):
        _disturb(case, call)

    assert differences(before, seen(case, call)) == []


@pytest.mark.parametrize("error", [RuntimeError("in the pass"), KeyboardInterrupt()], ids=["error", "interrupt"])
@every_case
def test_puts_back_when_the_block_raises(case, error, stack):
    """A block that raises leaves no trace either, and its error comes out."""
    call = case.build(stack)
    before = seen(case, call)
    with pytest.raises(type(error)) as raised, case.guard(call):
        _disturb(case, call)
        raise error

    assert raised.value is error
    assert differences(before, seen(case, call)) == []


@every_case
def test_nests(case, stack):
    """An inner block puts back what it found, and the outer one what it found."""
    call = case.build(stack)
    outermost = seen(case, call)
    with case.guard(call):
        _disturb(case, call)
        between = seen(case, call)
        with case.guard(call):
            _disturb(case, call)
        assert differences(between, seen(case, call)) == []
        _disturb(case, call)

    assert differences(outermost, seen(case, call)) == []


@every_case
def test_entering_alone_changes_nothing(case, stack):
    """To save and put back is no change: a skipped warmup leaves as it came."""
    call = case.build(stack)
    before = seen(case, call)
    with case.guard(call):
        pass

    assert differences(before, seen(case, call)) == []


@every_case
def test_gives_the_same_objects_back(case, stack):
    """Objects that others may hold come back as themselves, not as equal copies."""
    call = case.build(stack)
    before = identities(seen(case, call))
    with case.guard(call):
        _disturb(case, call)

    assert any(same.value is not None for same in before), f"{case}: observe shows no object by identity"
    assert differences(before, identities(seen(case, call))) == []


@every_case
def test_issues_no_collective(case, stack):
    """A guard never communicates: only some ranks may hold the state that it keeps."""
    stack.enter_context(alone())
    call = case.build(stack)
    with Communication() as communication, case.guard(call):
        pass

    assert communication.operators == []


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.__name__)
def test_does_nothing_where_the_feature_is_absent(guard):
    """A plain module without Megatron around it comes out as it went in, and no module gets imported."""
    call = call_of(torch.nn.Linear(2, 2), config=ModelParallelConfig(timers=None))
    case = Case(guard, lambda stack: call, _everything_plain, lambda call: None)
    before, modules = seen(case, call), set(sys.modules)
    with guard(call):
        pass

    assert differences(before, seen(case, call)) == []
    assert set(sys.modules) == modules


def _everything_plain(call):
    """Observe every attribute of a plain module, of its parameters and of its config."""
    module = call.chunks[0]
    return {
        "module": {name: Same(value) for name, value in vars(module).items()},
        "parameters": [Same(module.weight), Same(module.bias), Same(module.weight.grad), vars(module.weight)],
        "values": [module.weight, module.bias],
        "config": {name: Same(value) for name, value in vars(call.config).items()},
    }


# --- the laws themselves can fail: each broken guard below breaks the law named beside it ---


def _list_case(guard):
    def build(stack):
        call = call_of(torch.nn.Linear(1, 1))
        call.chunks[0].seen = [1]
        return call

    return Case(
        guard,
        build,
        lambda call: [Same(call.chunks[0].seen), list(call.chunks[0].seen)],
        lambda call: call.chunks[0].seen.append(2),
    )


@contextmanager
def careful(call):
    """Obey every law."""
    kept = list(call.chunks[0].seen)
    try:
        yield
    finally:
        call.chunks[0].seen[:] = kept


@contextmanager
def careless(call):
    """Put nothing back."""
    yield


@contextmanager
def optimistic(call):
    """Put back on success only."""
    kept = list(call.chunks[0].seen)
    yield
    call.chunks[0].seen[:] = kept


@contextmanager
def copying(call):
    """Give an equal copy back."""
    kept = list(call.chunks[0].seen)
    try:
        yield
    finally:
        call.chunks[0].seen = kept


@contextmanager
def clearing(call):
    """Put back what the first entry found, whatever is found later."""
    try:
        yield
    finally:
        call.chunks[0].seen[:] = [1]


@contextmanager
def talkative(call):
    """Communicate."""
    with careful(call):
        torch.distributed.all_reduce(torch.ones(1))
        yield


@contextmanager
def forgetful(call):
    """Leave something behind by merely entering."""
    call.chunks[0].seen.append(3)
    yield


@contextmanager
def swallowing(call):
    """Swallow the block's error."""
    kept = list(call.chunks[0].seen)
    try:
        yield
    except RuntimeError:
        pass
    finally:
        call.chunks[0].seen[:] = kept


LAWS = {
    test_puts_back_what_the_block_changed: careless,
    lambda case, stack: test_puts_back_when_the_block_raises(case, RuntimeError(), stack): optimistic,
    lambda case, stack: test_puts_back_when_the_block_raises(case, RuntimeError("swallowed"), stack): swallowing,
    test_nests: clearing,
    test_entering_alone_changes_nothing: forgetful,
    test_gives_the_same_objects_back: copying,
    test_issues_no_collective: talkative,
}


@pytest.mark.parametrize(("law", "broken"), LAWS.items(), ids=lambda item: item.__name__)
def test_each_law_can_fail(law, broken):
    """A careful guard passes the law, and the one that breaks it does not."""
    with ExitStack() as stack:
        law(_list_case(careful), stack)
    with ExitStack() as stack, pytest.raises((AssertionError, pytest.fail.Exception)):
        law(_list_case(broken), stack)


def test_a_case_that_disturbs_nothing_is_noticed():
    """A case whose disturb does not show cannot pass."""
    case = replace(_list_case(careful), disturb=lambda call: None)
    with ExitStack() as stack, pytest.raises(AssertionError, match="disturb changed nothing"):
        test_puts_back_what_the_block_changed(case, stack)


def test_a_collective_of_megatron_itself_is_noticed():
    """The detector sees collectives wherever they come from, barriers and sends included."""
    with alone(), Communication() as communication:
        torch.distributed.barrier()
        torch.distributed.all_gather_into_tensor(torch.zeros(1), torch.zeros(1))

    assert [name.split(".")[1] for name in communication.operators] == ["barrier", "_allgather_base_"]
