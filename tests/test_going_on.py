"""A pass that fails costs a run nothing: it goes on without a warmup, to the bit as if none had been asked for."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelines import SMALL, VIRTUAL, Witness, call, losses_of_step, pipeline, start_anew

from pp_free_warmup import _channels, in_warmup, pipeline_warmup, warm_first_call
from pp_free_warmup import _megatron as megatron
from pp_free_warmup._ledger import TRAINING, ledger
from pp_free_warmup.errors import RestoreFailed, WarmupFailed
from pp_free_warmup.testing import models, ranks
from pp_free_warmup.testing.models import Layout
from pp_free_warmup.testing.parity import differences, record


def _fail(what: Exception | None = None) -> None:
    if in_warmup():
        raise what or ValueError("no such kernel")


def _failing_in(place: str, rank: int) -> Any:
    """Return a ``forward_step_func`` whose pass fails at one place on one rank."""

    def step(iterator: Any, chunk: Any) -> Any:
        here = dist.get_rank() == rank
        if here and place == "forward":
            _fail()
        output, loss = models.forward_step(iterator, chunk)
        if here and place == "backward" and in_warmup():
            output.register_hook(lambda _gradient: _fail())
        if here and place == "memory":
            _fail(torch.OutOfMemoryError("out of memory"))
        return output, loss

    return step


def _cold_and_failed(layout: Layout, step: Any = models.forward_step, **keywords: Any) -> tuple[list[str], Any]:
    """Train twice, never warmed and with a warmup that fails; return what differs, and the report."""
    made = []

    def around(training: Any) -> Any:
        made.append(pipeline_warmup(training.chunks, **keywords))
        return made[0]

    def build(layout: Layout, seed: int) -> Any:
        return models.build(layout, seed, step=step)

    cold = record(layout, 3)
    return differences(cold, record(layout, 3, around=around, make=build)), made[0].report


@ranks(2)
@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize(("place", "rank"), [("forward", 0), ("forward", 1), ("backward", 1), ("memory", 0)])
def test_a_run_whose_pass_fails_is_the_run_without_one(place, rank, virtual):
    """Wherever it fails, losses, gradients, parameters and random numbers of this and later steps are the same."""
    found, report = _cold_and_failed(VIRTUAL if virtual else SMALL, _failing_in(place, rank))

    assert found == []
    assert report.outcome == "failed"
    cause = "OutOfMemoryError: out of memory" if place == "memory" else "ValueError: no such kernel"
    assert report.reason == f"rank {rank} (stage {rank}): {cause}"


@ranks(4)
@pytest.mark.parametrize("layout", [replace(SMALL, pp=4, layers=4), replace(SMALL, distributed_optimizer=True)])
def test_ranks_that_did_not_fail_go_on_as_well(layout):
    """In a longer pipeline, and beside another replica, all go on together."""
    found, report = _cold_and_failed(layout, _failing_in("backward", 2))

    assert found == []
    assert report.reason.startswith("rank 2 (stage ")


@ranks(2)
def test_a_guard_that_cannot_save_is_gone_on_without():
    """What was saved before it is put back; nobody runs the pass."""

    @contextmanager
    def mine(_call: Any) -> Iterator[None]:
        if dist.get_rank() == 1:
            raise OSError("disk full")
        yield

    found, report = _cold_and_failed(SMALL, extra_guards=[mine])

    assert found == []
    assert (report.outcome, report.reason) == ("failed", "rank 1 (stage 1): OSError: disk full")


@ranks(2)
def test_channels_that_no_rank_could_open_are_gone_on_without():
    """A communicator of another make, which cannot be primed, is left to the real step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_channels.megatron, "exchange", lambda *_, **__: _unknown())
        found, report = _cold_and_failed(SMALL)

    assert found == []
    assert report.outcome == "failed"
    assert report.reason.count("AttributeError: no _communicate") == 2


def _unknown() -> None:
    raise AttributeError("no _communicate")


@ranks(2)
def test_a_channel_open_on_one_side_only_stops_the_run():
    """What waits in it would be taken for an activation."""
    training = pipeline()
    own = megatron.exchange

    def exchange(*given: Any, **asked: Any) -> None:
        own(*given, **asked)
        if dist.get_rank() == 1 and not asked["forward"]:
            _unknown()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_channels.megatron, "exchange", exchange)
        with (
            pytest.raises(WarmupFailed, match=r"rank 1 \(stage 1\): AttributeError: no _communicate") as raised,
            pipeline_warmup(),
        ):
            call(training)

    assert raised.value.wrong.endswith("but a transfer between ranks broke off.")
    assert training.forward_step.counts == (1, 0)


@ranks(2)
def test_the_kind_is_closed_and_said_once():
    """One line on the first rank names rank, stage and cause; later calls run without a pass."""
    training, lines = pipeline(also=_fail), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pp_free_warmup").addHandler(handler)
    with pipeline_warmup() as warmup:
        call(training)
        call(training)
    logging.getLogger("pp_free_warmup").removeHandler(handler)

    told = [line for line in lines if "failed" in line]
    assert training.forward_step.counts == (1, 4)
    assert ledger.page(training.chunks[0], TRAINING).warm is False
    assert [report.outcome for report in warmup.reports] == ["failed"]
    assert len(told) == (dist.get_rank() == 0)
    for line in told:
        assert "rank 0 (stage 0): ValueError: no such kernel; rank 1 (stage 1): ValueError" in line
        assert "please report" in line


def _looks(*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, **more) -> Any:
    """Stand for a schedule that reads its data and waits for nobody."""
    return len(data_iterator) if isinstance(data_iterator, list) else next(data_iterator)


@ranks(2)
def test_an_empty_iterator_is_the_real_steps_to_complain_about():
    """The schedule runs, and says that there is no batch as it does without a warmup."""
    training = pipeline()
    schedule = warm_first_call(_looks)
    with pytest.raises(StopIteration):
        call(training, schedule, data_iterator=iter(()))

    assert schedule.warmup.report.outcome == "failed"
    assert schedule.warmup.report.reason.startswith("rank 0 (stage 0): StopIteration")


def _breaking(batches: Iterator[Any]) -> Iterator[Any]:
    yield next(batches)
    raise ValueError("record 7 is damaged")


@ranks(2)
def test_what_the_iterator_raised_is_raised_where_it_would_have_been():
    """A generator that raised in the pass would just end when asked again: the real step gets its error."""
    training = pipeline(replace(SMALL, layers=2))
    training.iterators = [_breaking(training.iterators[0])]

    def twice(iterator: Any, chunk: Any) -> Any:
        next(iterator)
        return models.forward_step(iterator, chunk)

    training.forward_step = twice
    schedule = warm_first_call(_looks_twice)
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="record 7 is damaged"):
            call(training, schedule)
        assert schedule.warmup.report.reason.startswith("rank 0 (stage 0): ValueError: record 7 is damaged")
    else:
        training.forward_step = models.forward_step
        call(training, schedule, data_iterator=models.batches(SMALL, 1))
        assert schedule.warmup.report.outcome == "failed"


def _looks_twice(
    *, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, **more
) -> Any:
    """Stand for a schedule that reads two batches and waits for nobody."""
    return next(data_iterator), next(data_iterator)


@ranks(2)
def test_a_wrong_number_of_iterators_is_the_real_steps_to_complain_about():
    """The schedule gets what the caller passed."""
    training = pipeline(VIRTUAL)
    schedule = warm_first_call(_looks)

    assert call(training, schedule, data_iterator=training.iterators[:1]) == 1
    assert "1 iterators for 2 chunks" in schedule.warmup.report.reason


@ranks(2)
def test_one_rank_that_wants_the_error_decides_for_all():
    """Ranks that disagree about ``on_failure`` do not part ways: both raise."""
    training = pipeline(also=lambda: dist.get_rank() == 0 and _fail())
    asked = "raise" if dist.get_rank() == 1 else "continue"
    with pytest.raises(WarmupFailed, match=r"rank 0 .*no such kernel"), pipeline_warmup(on_failure=asked):
        call(training)

    assert training.forward_step.counts == (1, 0)


@ranks(2)
def test_unknown_state_still_stops_the_run():
    """A guard that cannot put back after a pass that failed ends the call on both ranks."""

    @contextmanager
    def mine(_call: Any) -> Iterator[None]:
        yield
        if dist.get_rank() == 0:
            raise OSError("disk full")

    training = pipeline(also=_fail)
    expected = RestoreFailed if dist.get_rank() == 0 else WarmupFailed
    with pytest.raises(expected, match="disk full") as raised, pipeline_warmup(extra_guards=[mine]):
        call(training)

    assert dist.get_rank() == 1 or isinstance(raised.value.__context__, ValueError)
    assert training.forward_step.counts == (1, 0)


@ranks(2)
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_still_stops_the_run(interrupt):
    """The other rank is told of it, and not to mend anything."""
    training = pipeline(also=lambda: dist.get_rank() == 0 and in_warmup() and _raise(interrupt))
    expected = interrupt if dist.get_rank() == 0 else WarmupFailed
    with pytest.raises(expected) as raised, pipeline_warmup():
        call(training)

    if dist.get_rank() == 1:
        assert raised.value.wrong == "The warmup of the pipeline was interrupted and undone."
        assert raised.value.do == "Start the run again when it is wanted."


def _raise(kind: type[BaseException]) -> None:
    raise kind


@ranks(2)
def test_what_the_pass_computed_is_freed_before_the_real_step():
    """The error that is gone on from keeps no activation alive, not even until the next collection."""
    alive, seen = Witness(), Witness()

    def step(iterator: Any, chunk: Any) -> Any:
        if not in_warmup():
            seen.append(sum(one() is not None for one in alive.notes))
        output, loss = models.forward_step(iterator, chunk)
        if in_warmup():
            alive.append(weakref.ref(output))
            _fail()
        return output, loss

    gc.disable()
    try:
        training = models.build(SMALL, step=step)
        with pipeline_warmup():
            training.step()
    finally:
        gc.enable()

    assert seen.notes[0] == 0
    assert len(alive) == 1


@ranks(2)
def test_the_step_of_a_failed_warmup_is_a_whole_step():
    """Losses of the very call whose pass failed are a cold run's."""
    cold = losses_of_step(pipeline())
    start_anew(SMALL)
    failed = pipeline(also=_fail)
    with pipeline_warmup():
        assert losses_of_step(failed) == cold
