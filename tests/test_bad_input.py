"""What a user can get wrong: a named error in four parts, on every rank, and nothing is left changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from pipelines import SMALL, VIRTUAL, call, losses_of_step, pipeline, start_anew

from pp_free_warmup import in_warmup, pipeline_warmup, warm_first_call
from pp_free_warmup._ledger import FORWARD_ONLY, TRAINING, ledger
from pp_free_warmup.errors import (
    NotInitialized,
    UnsupportedMegatron,
    UnsupportedSetup,
    WarmupError,
    WarmupFailed,
    WrongCall,
)
from pp_free_warmup.testing import assert_leaves_no_trace, ranks

REQUIRED = {
    "forward_step_func": print,
    "data_iterator": None,
    "model": torch.nn.Identity(),
    "num_microbatches": 1,
    "seq_length": 1,
    "micro_batch_size": 1,
}
SCHEDULE = "forward_backward_pipelining_without_interleaving"


def _has_four_parts(error: WarmupError) -> bool:
    parts = (error.wrong, error.found, error.matters, error.do)
    text = f"{error.wrong}\nFound: {error.found}\nWhy it matters: {error.matters}\nWhat to do: {error.do}"
    return str(error) == text and all(part.strip()[-1:] in {".", ")"} for part in parts)


def _door(name: str) -> Any:
    """Return the bare schedule as one of the two doors leaves it."""
    if name == "decorator":
        return warm_first_call(getattr(schedules, SCHEDULE))
    return lambda **keywords: getattr(schedules, SCHEDULE)(**keywords)


@pytest.fixture(params=["block", "decorator"])
def door(request):
    """Call a schedule through a block, and through the decorator."""
    if request.param == "decorator":
        yield warm_first_call(getattr(schedules, SCHEDULE))
        return
    warmup = pipeline_warmup()
    warmup.__enter__()
    yield getattr(schedules, SCHEDULE)
    warmup.__exit__(Exception, None, None)


# --- calls that no schedule takes -------------------------------------------------------------------------------------


def test_positional_arguments(door):
    """A schedule takes keywords only."""
    with pytest.raises(WrongCall) as raised:
        door(print, None)

    assert raised.value.found == "2 positional; expected keywords only, as Megatron's schedules take them."
    assert _has_four_parts(raised.value)


@pytest.mark.parametrize("model", [None, 3, "model", [], [None], object, {"a": torch.nn.Identity()}], ids=str)
def test_something_that_is_no_model(door, model):
    """What is neither a chunk nor a list of chunks is named."""
    with pytest.raises(UnsupportedSetup) as raised:
        door(**{**REQUIRED, "model": model})

    assert raised.value.wrong == "The model to warm is no model."
    assert type(model).__name__ in raised.value.found
    assert _has_four_parts(raised.value)


def test_no_model_at_all(door):
    """A call without ``model`` is told so."""
    with pytest.raises(UnsupportedSetup, match="The model to warm is no model"):
        door(**{name: value for name, value in REQUIRED.items() if name != "model"})


@pytest.mark.parametrize("name", sorted(set(REQUIRED) - {"model"}))
def test_a_required_argument_is_missing(door, name):
    """The missing one is named, before anything else is looked at."""
    with pytest.raises(WrongCall) as raised:
        door(**{key: value for key, value in REQUIRED.items() if key != name})

    assert raised.value.found.startswith(f"no {name}; expected data_iterator, forward_step_func, ")
    assert _has_four_parts(raised.value)


def test_torch_distributed_is_not_initialised(door):
    """Without process groups there is no pipeline."""
    with pytest.raises(NotInitialized) as raised:
        door(**REQUIRED)

    assert raised.value.wrong == "torch.distributed is not initialised."
    assert _has_four_parts(raised.value)


@ranks(1)
def test_megatron_is_not_initialised():
    """A world without Megatron's groups is not enough."""
    with pytest.raises(NotInitialized) as raised:
        _door("decorator")(**REQUIRED)

    assert raised.value.wrong == "Megatron's parallel state is not initialised."
    assert _has_four_parts(raised.value)


@pytest.mark.parametrize("missing", ["forward_step", "backward_step", SCHEDULE])
def test_an_unknown_megatron(monkeypatch, missing):
    """A function that is gone is named with what was expected, and nothing was patched."""
    before = {name: value for name, value in vars(schedules).items() if name.startswith("forward_backward")}
    monkeypatch.delattr(schedules, missing)
    with pytest.raises(UnsupportedMegatron) as raised, pipeline_warmup():
        pass
    monkeypatch.undo()

    assert f"schedules.{missing} has an unknown form" in raised.value.wrong
    assert raised.value.found == "nothing by that name; expected a function."
    assert _has_four_parts(raised.value)
    assert all(getattr(schedules, name) is value for name, value in before.items())


def test_an_unknown_megatron_is_no_matter_where_the_warmup_is_off(monkeypatch):
    """The way out that the error names works: switched off, a block neither checks nor patches."""
    monkeypatch.delattr(schedules, "backward_step")
    with pipeline_warmup(enabled=False):
        pass
    monkeypatch.setenv("PP_FREE_WARMUP", "0")
    with pipeline_warmup():
        assert not hasattr(getattr(schedules, SCHEDULE), "__wrapped__")


@ranks(2)
def test_a_model_without_a_config():
    """A torch module that Megatron did not build is refused by name."""
    training = pipeline()
    bare = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedSetup) as raised:
        call(training, warm_first_call(getattr(schedules, SCHEDULE)), model=bare)

    assert raised.value.wrong == "The model to warm has no Megatron config."
    assert raised.value.found.startswith("Linear without .config")
    assert _has_four_parts(raised.value)


# --- calls whose data does not fit ------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("where", ["everywhere", "on one rank"])
def test_another_number_of_iterators_than_of_chunks(where):
    """The rank that sees it gets the error itself, the other one an error that names it; nobody waits."""
    training = pipeline(VIRTUAL)
    here = where == "everywhere" or dist.get_rank() == 1
    iterators = training.iterators[:1] if here else training.iterators
    with assert_leaves_no_trace(training.chunks, training.optimizer), pytest.raises(WarmupError) as raised:
        call(
            training,
            warm_first_call(schedules.forward_backward_pipelining_with_interleaving, on_failure="raise"),
            data_iterator=iterators,
        )

    told = "The schedule got another number of data iterators than of model chunks."
    assert isinstance(raised.value, UnsupportedSetup if here else WarmupFailed)
    assert told in str(raised.value)
    assert "1 iterators for 2 chunks" in raised.value.found
    assert _has_four_parts(raised.value)
    assert training.forward_step.counts == (0, 0)


@ranks(2)
def test_an_exhausted_iterator():
    """A loader without a batch fails the pass on every rank, and the error says that there was none."""
    training = pipeline()
    empty = iter(()) if dist.get_rank() == 0 else training.iterators[0]
    with assert_leaves_no_trace(training.chunks, training.optimizer), pytest.raises(WarmupFailed) as raised:
        call(training, warm_first_call(getattr(schedules, SCHEDULE), on_failure="raise"), data_iterator=empty)

    assert raised.value.found.startswith("rank 0: StopIteration: ")
    assert raised.value.matters.endswith(
        "A data iterator had no batch for it."
        if dist.get_rank() == 0
        else "1 batch(es) fetched on this rank are consumed."
    )
    assert _has_four_parts(raised.value)


# --- passes that fail -------------------------------------------------------------------------------------------------


def _fails_in(place: str, rank: int, training: Any) -> None:
    """Make the pass of *training* fail on one rank at one place."""
    if dist.get_rank() != rank:
        return
    if place == "forward":
        training.forward_step.also = _fail
    elif place == "loss":
        plain = training.forward_step

        def step(iterator: Any, chunk: Any) -> Any:
            return plain(iterator, chunk)[0], lambda output: _fail()

        training.forward_step = step
    elif place == "backward":
        parameter = next(p for p in training.chunks[-1].parameters() if p.requires_grad)
        parameter.register_hook(lambda gradient: _fail())


def _fail() -> None:
    if in_warmup():
        raise ValueError("out of luck")


@ranks(2)
@pytest.mark.parametrize(
    ("place", "rank"), [("forward", 0), ("forward", 1), ("loss", 1), ("backward", 0), ("backward", 1)]
)
@pytest.mark.parametrize("virtual", [False, True])
def test_a_failing_pass_raises_on_every_rank_and_leaves_no_trace(place, rank, virtual):
    """Wherever it fails, all state is put back, the error names the rank, and the kind is closed."""
    training = pipeline(VIRTUAL if virtual else SMALL)
    _fails_in(place, rank, training)
    schedule = schedules.forward_backward_pipelining_with_interleaving if virtual else getattr(schedules, SCHEDULE)
    with assert_leaves_no_trace(training.chunks, training.optimizer), pytest.raises(WarmupFailed) as raised:
        call(training, warm_first_call(schedule, on_failure="raise"))

    assert raised.value.found.startswith(f"rank {rank}: ValueError: out of luck;")
    assert isinstance(raised.value.__cause__, ValueError) is (dist.get_rank() == rank)
    assert _has_four_parts(raised.value)
    assert ledger.page(training.chunks[0], TRAINING).warm is False
    assert not in_warmup()


@ranks(2)
def test_a_failing_forward_only_pass():
    """The other kind fails in the same way, and leaves the training kind open."""
    training = pipeline(also=_fail)
    with assert_leaves_no_trace(training.chunks), pytest.raises(WarmupFailed), torch.no_grad():
        call(training, warm_first_call(getattr(schedules, SCHEDULE), on_failure="raise"), forward_only=True)

    assert ledger.page(training.chunks[0], FORWARD_ONLY).warm is False
    assert ledger.page(training.chunks[0], TRAINING) is None


@ranks(4)
def test_a_failing_pass_in_a_longer_pipeline():
    """A stage in the middle fails: all four ranks raise, with one text."""
    training = pipeline(replace(SMALL, pp=4, layers=4))
    _fails_in("forward", 2, training)
    with assert_leaves_no_trace(training.chunks, training.optimizer), pytest.raises(WarmupFailed) as raised:
        call(training, warm_first_call(getattr(schedules, SCHEDULE), on_failure="raise"))

    assert raised.value.found.startswith("rank 2: ValueError: out of luck;")


@ranks(4)
def test_a_failing_pass_with_data_parallel_ranks():
    """One of two replicas fails: the other pipeline's ranks raise too, and none goes on alone."""
    training = pipeline(replace(SMALL, distributed_optimizer=True, overlap_grad_reduce=True))
    _fails_in("backward", 3, training)
    with assert_leaves_no_trace(training.chunks, training.optimizer), pytest.raises(WarmupFailed) as raised:
        call(training, warm_first_call(getattr(schedules, SCHEDULE), on_failure="raise"))

    assert raised.value.found.startswith("rank 3: ValueError: out of luck;")


@ranks(2)
def test_the_step_after_a_failed_warmup_is_as_without_one():
    """A user who catches the error and goes on trains as if there had been no warmup."""
    cold = pipeline()
    losses = [losses_of_step(cold)]
    start_anew(SMALL)
    failed = pipeline(also=_fail)
    with pytest.raises(WarmupFailed), pipeline_warmup(on_failure="raise"):
        failed.step()
    failed.forward_step.also = None
    losses.append(losses_of_step(failed))

    assert failed.forward_step.passes == 1
    assert losses[0] == losses[1]
    assert len(losses[0]) == (2 if dist.get_rank() == 1 else 0)


@ranks(2)
def test_an_enabled_that_raises_on_one_rank():
    """A switch that fails fails the call on every rank; nobody waits for the one whose switch it was."""

    def enabled() -> bool:
        if dist.get_rank() == 1:
            raise KeyError("no such flag")
        return True

    training = pipeline()
    with pytest.raises(WarmupFailed, match="rank 1: KeyError: 'no such flag'"):
        call(training, warm_first_call(getattr(schedules, SCHEDULE), enabled=enabled, on_failure="raise"))

    assert training.forward_step.counts == (0, 0)
