"""`pipeline_warmup` as a block: who enters when, who leaves when, and what is left behind."""

from __future__ import annotations

import gc
import json
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from pipelines import SMALL, VIRTUAL, Witness, call, everyone, fetched, heard, losses_of_step, pipeline, start_anew

from pp_free_warmup import in_warmup, pipeline_warmup
from pp_free_warmup._ledger import FORWARD_ONLY, TRAINING, ledger
from pp_free_warmup._megatron import SCHEDULE_NAMES
from pp_free_warmup.errors import RestoreFailed, UnsupportedSetup, WarmupFailed
from pp_free_warmup.testing import assert_leaves_no_trace, models, ranks

COLD_THEN_WARM = (1, 4)


def _schedules() -> list[int]:
    return [id(getattr(schedules, name)) for name in SCHEDULE_NAMES]


# --- one block --------------------------------------------------------------------------------------------------------


@ranks(2)
def test_the_first_call_in_a_block_is_warmed():
    """One pass, then every call for real, in the block and after it; Megatron's own functions are back."""
    training, before = pipeline(), _schedules()
    with pipeline_warmup() as warmup:
        call(training)
    call(training)

    assert training.forward_step.counts == COLD_THEN_WARM
    assert warmup.report.outcome == "warmed"
    assert _schedules() == before


@ranks(2)
def test_a_block_around_a_whole_loop():
    """Training and evaluation in one block: each kind is warmed once."""
    training = pipeline()
    with pipeline_warmup() as warmup:
        for _ in range(3):
            call(training)
            with torch.no_grad():
                call(training, forward_only=True)

    assert training.forward_step.counts == (2, 12)
    assert [report.kind for report in warmup.reports] == [TRAINING, FORWARD_ONLY]


@ranks(2)
@pytest.mark.parametrize("form", ["chunk", "list", "tuple", "unwrapped", "generator"])
def test_a_block_for_one_model(form):
    """The model is recognised as a chunk or a list of chunks, wrapped or not."""
    training = pipeline()
    chunk = training.chunks[0]
    given = {
        "chunk": chunk,
        "list": [chunk],
        "tuple": (chunk,),
        "unwrapped": chunk.module,
        "generator": (c for c in [chunk]),
    }[form]
    with pipeline_warmup(given):
        call(training)

    assert training.forward_step.counts == (1, 2)


@ranks(2)
def test_the_calls_of_another_model_run_untouched():
    """Reference and critic inside the actor's block are not warmed, and may be warmed later."""
    actor, critic = pipeline(), pipeline(seed=2)
    with pipeline_warmup(actor.chunks) as warmup:
        call(critic)
        call(actor)
    untouched = critic.forward_step.counts
    with pipeline_warmup(critic.chunks):
        call(critic)

    assert untouched == (0, 2)
    assert actor.forward_step.counts == (1, 2)
    assert critic.forward_step.counts == COLD_THEN_WARM
    assert len(warmup.reports) == 1


@ranks(2)
def test_a_block_for_virtual_stages():
    """Both chunks of each rank run once in the pass; their iterators and losses are in order."""
    training = pipeline(VIRTUAL)
    with pipeline_warmup(training.chunks) as warmup:
        call(training)

    assert training.forward_step.counts == (2, 4)
    assert {"forward[0]", "forward[1]", "backward[0]", "backward[1]"} <= set(warmup.report.seconds)


@ranks(4)
def test_a_block_over_four_stages():
    """Stages in the middle, which see no data, warm like the others."""
    training = pipeline(replace(SMALL, pp=4, layers=4))
    with pipeline_warmup() as warmup:
        call(training)

    assert training.forward_step.counts == (1, 2)
    assert [stage.ranks for stage in warmup.report.stages] == [1, 1, 1, 1]


@ranks(2)
def test_the_losses_are_those_of_a_run_without_a_warmup():
    """Three steps with dropout: the same numbers to the bit, with and without the block."""
    cold = pipeline()
    losses = [[losses_of_step(cold) for _ in range(3)]]
    start_anew(SMALL)
    warmed = pipeline()
    with pipeline_warmup(warmed.chunks, warmed.optimizer):
        losses.append([losses_of_step(warmed) for _ in range(3)])

    assert warmed.forward_step.passes == 1
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == (3 if dist.get_rank() == 1 else 1)


@ranks(2)
def test_the_pass_leaves_no_trace():
    """Everything reachable is compared field by field around a call whose real schedule does nothing."""
    training = pipeline()
    with assert_leaves_no_trace(training.chunks, training.optimizer), pipeline_warmup():
        _call_nothing(training)

    assert training.forward_step.counts == (1, 0)


def _call_nothing(training: Any, **keywords: Any) -> Any:
    """Warm up for a schedule that does nothing itself."""
    from pp_free_warmup import warm_first_call

    return call(training, warm_first_call(_nothing), **keywords)


def _nothing(*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, **more) -> Any:
    """Stand for a schedule without any effect of its own."""
    return data_iterator


@ranks(2)
def test_the_fetched_batches_are_served_again():
    """What the pass read from the iterator is what the real schedule reads first."""
    training = pipeline()
    items = [next(training.iterators[0]) for _ in range(3)]
    with pipeline_warmup():
        served = _call_nothing(training, data_iterator=iter(items))

    assert [item is again for item, again in zip(items, served, strict=True)] == [True, True, True]


@ranks(2)
def test_the_optimizer_is_never_stepped():
    """It may be named, for symmetry; its state and the parameters stay."""
    training = pipeline()
    before = [parameter.detach().clone() for chunk in training.chunks for parameter in chunk.parameters()]
    with pipeline_warmup(training.chunks, training.optimizer):
        call(training)

    after = [parameter for chunk in training.chunks for parameter in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# --- several blocks ---------------------------------------------------------------------------------------------------


@ranks(2)
def test_nested_blocks():
    """The inner one warms, the outer one does not again, and both report it without complaint."""
    training = pipeline()
    with pipeline_warmup() as outer:
        with pipeline_warmup() as inner:
            call(training)
        call(training)

    assert training.forward_step.counts == COLD_THEN_WARM
    assert outer.report is inner.report


@ranks(2)
def test_nested_blocks_for_two_models():
    """Each block takes its own model's calls, and reports its own alone."""
    actor, critic = pipeline(), pipeline(seed=2)
    with pipeline_warmup(actor.chunks) as outer, pipeline_warmup(critic.chunks) as inner:
        call(actor)
        call(critic)

    assert actor.forward_step.counts == critic.forward_step.counts == (1, 2)
    assert (len(outer.reports), len(inner.reports)) == (1, 1)
    assert outer.report is not inner.report


@ranks(2)
def test_a_disabled_block_inside_a_block():
    """The innermost block decides; what it leaves alone, the outer one warms later."""
    training = pipeline()
    with pipeline_warmup():
        with pipeline_warmup(enabled=False):
            call(training)
        off = training.forward_step.counts
        call(training)

    assert off == (0, 2)
    assert training.forward_step.counts == COLD_THEN_WARM


@ranks(2)
def test_blocks_one_after_the_other():
    """A second block finds nothing to do, and says so."""
    training = pipeline()
    with pipeline_warmup():
        call(training)
    with pipeline_warmup() as second:
        call(training)

    assert training.forward_step.counts == COLD_THEN_WARM
    assert (second.report.outcome, second.report.reason) == ("skipped", "nothing was left to do")


@ranks(2)
def test_one_block_entered_twice():
    """The same handle can be used for a second block, and inside itself."""
    training, warmup = pipeline(), pipeline_warmup()
    with warmup, warmup:
        call(training)
    with warmup:
        call(training, forward_only=True)

    assert training.forward_step.counts == (2, 4)
    assert [report.kind for report in warmup.reports] == [TRAINING, FORWARD_ONLY]


@ranks(2)
def test_blocks_that_leave_in_another_order():
    """The one that entered first leaves first: the other goes on warming, then Megatron's own are back."""
    training, before = pipeline(), _schedules()
    first, second = pipeline_warmup(), pipeline_warmup()
    first.__enter__()
    second.__enter__()
    call(training)
    first.__exit__(None, None, None)
    call(training, forward_only=True)
    second.__exit__(None, None, None)

    assert training.forward_step.counts == (2, 4)
    assert [len(warmup.reports) for warmup in (first, second)] == [1, 2]
    assert _schedules() == before


@ranks(2)
def test_a_function_that_outlives_its_block():
    """A schedule fetched in a block goes on working, unwarmed, and keeps no model."""
    training, other = pipeline(), pipeline(seed=2)
    with pipeline_warmup():
        schedule = fetched()
        call(training, schedule)
    call(training, schedule)
    call(other, schedule)

    assert training.forward_step.counts == COLD_THEN_WARM
    assert other.forward_step.counts == (0, 2)


@ranks(2)
def test_another_partys_patch_on_top():
    """A wrapper that somebody put over ours meanwhile is called, kept, and named in a warning."""
    training, name = pipeline(), "forward_backward_pipelining_without_interleaving"
    original, calls = getattr(schedules, name), []
    with pytest.warns(RuntimeWarning, match=f"{name} in megatron.core.pipeline_parallel.schedules was replaced"):
        with pipeline_warmup():
            ours = getattr(schedules, name)
            setattr(schedules, name, lambda **keywords: calls.append(1) or ours(**keywords))
            theirs = getattr(schedules, name)
            call(training)
    kept = getattr(schedules, name) is theirs
    call(training)
    setattr(schedules, name, original)

    assert kept
    assert len(calls) == 2
    assert training.forward_step.counts == COLD_THEN_WARM


# --- leaving by an error ----------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("called", [False, True])
def test_leaving_by_an_error(error, called):
    """The error goes on as it is, Megatron's own functions are back, and nothing complains on top."""
    training, before, raised = pipeline(), _schedules(), error("stop")
    with pytest.raises(error) as caught, pipeline_warmup():
        if called:
            call(training)
        raise raised

    assert caught.value is raised
    assert _schedules() == before


@ranks(2)
def test_an_interrupt_inside_the_pass():
    """The interrupted rank gets its interrupt, the other one an error that names it; all is put back."""

    def interrupt() -> None:
        if dist.get_rank() == 0:
            raise KeyboardInterrupt

    training, before = pipeline(also=interrupt), _schedules()
    expected = KeyboardInterrupt if dist.get_rank() == 0 else WarmupFailed
    with assert_leaves_no_trace(training.chunks, training.optimizer), pytest.raises(expected), pipeline_warmup():
        call(training)

    assert _schedules() == before
    assert not in_warmup()
    assert not ledger.taken


@ranks(2)
def test_a_block_without_a_schedule_call():
    """It says which form would have reached the schedule, at the line of the block."""
    training, schedule = pipeline(), fetched()
    with pytest.warns(RuntimeWarning, match=r"wrap that function itself, .*warm_first_call\(") as caught:
        with pipeline_warmup() as warmup:
            call(training, schedule)

    assert [warning.filename for warning in caught if warning.category is RuntimeWarning] == [__file__]
    assert warmup.report.outcome == "not called"
    assert training.forward_step.counts == (0, 2)


@ranks(2)
def test_a_step_past_a_block_is_told_while_it_runs():
    """A schedule held since before the block says at its first microbatch that it is not reached, and once."""
    training, schedule = pipeline(), fetched()
    told: list[int] = []
    with heard() as lines, pytest.warns(RuntimeWarning, match="no pipeline schedule was called"), pipeline_warmup():
        training.forward_step.also = lambda: told.append(len(lines))
        call(training, schedule)
        call(training, schedule)

    mine = 1 if dist.get_rank() == 0 else 0
    assert told == [mine] * 4
    assert len(lines) == mine
    assert all("a pipeline step runs past an open pipeline_warmup block" in line for line in lines)


@ranks(2)
def test_the_calls_of_another_model_do_not_count_as_past_a_block():
    """A call that the block leaves alone was reached all the same."""
    actor, critic = pipeline(), pipeline(seed=2)
    with heard() as lines, pipeline_warmup(actor.chunks, enabled=lambda: True):
        call(critic)
        past = list(lines)
        call(actor)

    assert past == []


def test_a_disabled_block_may_see_no_schedule(recwarn):
    """Where nothing could have been warmed, nobody complains."""
    with pipeline_warmup(enabled=False):
        pass

    assert len(recwarn) == 0


def test_a_block_switched_off_by_the_environment_may_see_no_schedule(recwarn, monkeypatch):
    """The same for PP_FREE_WARMUP=0."""
    monkeypatch.setenv("PP_FREE_WARMUP", "0")
    with pipeline_warmup():
        pass

    assert len(recwarn) == 0


# --- in_warmup --------------------------------------------------------------------------------------------------------


@ranks(2)
def test_in_warmup_in_forward_loss_and_backward():
    """True in the pass and false in the real step, wherever user code asks."""
    forward, backward = Witness(), Witness()
    training = pipeline(also=lambda: forward.append(in_warmup()))
    parameter = next(p for p in training.chunks[0].parameters() if p.requires_grad)
    handle = parameter.register_hook(lambda gradient: backward.append(in_warmup()))
    with pipeline_warmup():
        call(training)
    handle.remove()

    assert forward.notes == [True, False, False]
    assert backward.notes[0] is True
    assert set(backward.notes[1:]) == {False}
    assert in_warmup() is False


# --- switches ---------------------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("switch", ["bool", "callable", "environment"])
def test_a_block_that_is_switched_off(switch):
    """Every call runs untouched, the kind stays open, and one line says so on one rank."""
    training = pipeline()
    enabled = {"bool": False, "callable": lambda: False, "environment": True}[switch]
    with pytest.MonkeyPatch.context() as patch, heard() as lines, pipeline_warmup(enabled=enabled) as warmup:
        if switch == "environment":
            patch.setenv("PP_FREE_WARMUP", "0")
        call(training)
        call(training)

    assert training.forward_step.counts == (0, 4)
    assert warmup.report.outcome == "skipped"
    assert warmup.report.reason == "rank 0: switched off; rank 1: switched off"
    assert len(lines) == (1 if dist.get_rank() == 0 else 0)
    assert ledger.page(training.chunks[0], TRAINING) is None


@ranks(2)
def test_without_channels():
    """``channels=None`` opens none."""
    training = pipeline()
    with pipeline_warmup(channels=None) as warmup:
        call(training)

    assert training.forward_step.counts == (1, 2)
    assert "channels" not in warmup.report.seconds


# --- what it says -----------------------------------------------------------------------------------------------------


@ranks(2)
def test_one_rank_says_what_happens():
    """The first rank logs a line before and one after; the others are quiet."""
    training = pipeline()
    with heard() as lines, pipeline_warmup() as warmup:
        call(training)

    spoken = everyone(lines)
    assert spoken[1] == []
    assert spoken[0][0] == (
        "pp_free_warmup: 2 stages compile for their first training call at the same time: compiling, not hung"
    )
    assert spoken[0][-1].startswith("pp_free_warmup: training warmed in ")
    assert lines[-1:] == ([warmup.report.headline()] if dist.get_rank() == 0 else [])


@ranks(2)
def test_the_report_as_a_file(tmp_path):
    """Global rank 0 writes the last report as JSON, with every stage in it."""
    training, path = pipeline(), tmp_path / "report.json"
    with pipeline_warmup(report_to=path) as warmup:
        call(training)
    dist.barrier()

    written = json.loads(path.read_text(encoding="utf-8"))
    assert [stage["stage"] for stage in written["stages"]] == [0, 1]
    assert (written == warmup.report.to_dict()) or dist.get_rank() == 1


@ranks(2)
def test_a_report_that_cannot_be_written(tmp_path):
    """For want of a file no run ends: one line says so, and the step is taken."""
    training = pipeline()
    with heard() as lines, pipeline_warmup(report_to=tmp_path / "no folder" / "report.json"):
        call(training)

    assert training.forward_step.counts == (1, 2)
    assert any("the report was not written to" in line for line in lines) is (dist.get_rank() == 0)


# --- memory -----------------------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("given", [False, True])
def test_a_model_dies_when_the_user_drops_it(given):
    """After the block neither the handle, nor the ledger, nor a kept function holds the model."""
    training = pipeline()
    with pipeline_warmup(training.chunks if given else None) as warmup:
        schedule = fetched()
        call(training, schedule)
    gone = [weakref.ref(training.chunks[0]), weakref.ref(training.chunks[0].module)]

    del training
    gc.collect()

    assert [ref() for ref in gone] == [None, None]
    assert warmup.report.outcome == "warmed"
    assert schedule.__name__ in SCHEDULE_NAMES


@ranks(2)
def test_a_model_dies_inside_an_open_block():
    """A block around a long loop does not keep the first model while a second one is trained."""
    with pipeline_warmup():
        training = pipeline()
        call(training)
        gone = weakref.ref(training.chunks[0])
        del training
        gc.collect()
        dead = gone() is None
        again = pipeline(seed=2)
        call(again)

    assert dead
    assert again.forward_step.counts == (1, 2)


# --- guards of the user's own, and refusals ---------------------------------------------------------------------------


@ranks(2)
def test_a_guard_of_the_users_own():
    """It is entered around the pass, and left before the real step."""
    events = Witness()

    @contextmanager
    def mine(schedule_call):
        events.append(f"save {schedule_call.num_microbatches}")
        yield
        events.append("put back")

    training = pipeline(also=lambda: events.append("pass" if in_warmup() else "real"))
    with pipeline_warmup(extra_guards=[mine]):
        call(training)

    assert events.notes == ["save 2", "pass", "put back", "real", "real"]


@ranks(2)
def test_a_guard_that_cannot_save_on_one_rank():
    """Nobody runs the pass, every rank raises, and the reason names rank and error."""

    @contextmanager
    def mine(schedule_call):
        if dist.get_rank() == 1:
            raise OSError("disk full")
        yield

    training = pipeline()
    with assert_leaves_no_trace(training.chunks, training.optimizer):
        with (
            pytest.raises(WarmupFailed, match="rank 1: OSError: disk full"),
            pipeline_warmup(extra_guards=[mine], on_failure="raise"),
        ):
            call(training)

    assert training.forward_step.counts == (0, 0)


@ranks(2)
def test_a_guard_that_cannot_put_back_on_one_rank():
    """That rank gets RestoreFailed, which says to stop; the other one an error that names it."""

    @contextmanager
    def mine(schedule_call):
        yield
        if dist.get_rank() == 1:
            raise OSError("disk full")

    training = pipeline()
    expected = RestoreFailed if dist.get_rank() == 1 else WarmupFailed
    with pytest.raises(expected, match="OSError: disk full"), pipeline_warmup(extra_guards=[mine]):
        call(training)

    assert training.forward_step.counts == (1, 0)


class Loader:
    """Something that is no iterator, though `iter` takes it."""

    def __iter__(self) -> Any:
        """Iterate over nothing."""
        return iter(())


@ranks(2)
def test_a_setup_that_one_stage_refuses_is_skipped_on_all():
    """The reason is logged once and names the rank; the run goes on, and is not asked again."""
    training = pipeline()
    iterator = Loader() if dist.get_rank() == 1 else training.iterators[0]
    with heard() as lines, pipeline_warmup() as warmup:
        for _ in range(2):
            _call_through_block(training, data_iterator=iterator)

    assert training.forward_step.counts == (0, 0)
    assert len(warmup.reports) == 1
    assert warmup.report.reason == (
        "rank 1: data_iterator is a Loader, with neither __next__ nor get_next and offset [unreadable-iterator]; "
        "pass an iterator: iter(loader)"
    )
    assert len(lines) == (1 if dist.get_rank() == 0 else 0)


def _call_through_block(training: Any, **keywords: Any) -> Any:
    """Call a schedule that does nothing through the armed block."""
    from pp_free_warmup import _patch

    arguments = {**training.schedule_arguments(), **keywords}
    return _patch.armed()[-1].run(_nothing, arguments)


@ranks(2)
def test_on_unsupported_raise_stops_every_rank():
    """Who asks to stop is stopped everywhere, also where the stage itself could have gone."""
    training = pipeline()
    iterator = Loader() if dist.get_rank() == 1 else training.iterators[0]
    with pytest.raises(UnsupportedSetup, match=r"rank 1: .*\[unreadable-iterator\]"):
        with pipeline_warmup(on_unsupported="raise"):
            _call_through_block(training, data_iterator=iterator)

    assert training.forward_step.counts == (0, 0)


def _drawing(iterator: Any) -> Any:
    """Draw for every batch, in this process."""
    for batch in iterator:
        torch.rand(1)
        yield batch


@ranks(2)
def test_iterators_that_draw_in_another_order_are_told():
    """Virtual stages with data that draws: the rank says so, once, and only where two iterators do."""
    training = pipeline(VIRTUAL)
    if dist.get_rank() == 0:
        training.iterators = [_drawing(models.batches(VIRTUAL, seed)) for seed in (1, 2)]
    with heard() as lines, pipeline_warmup():
        call(training)

    told = [line for line in lines if "draws in another order" in line]
    assert len(told) == (1 if dist.get_rank() == 0 else 0)


@ranks(2)
def test_what_is_switched_off_is_not_refused():
    """Where nobody could vote, a block that is off runs the call untouched, even one that asks to be stopped."""
    training = pipeline()
    unknown = SimpleNamespace()  # a collection that does not say which ranks make up the stage
    with pipeline_warmup(enabled=lambda: False, on_unsupported="raise") as off:
        _call_through_block(training, pg_collection=unknown)
    with pipeline_warmup(on_unsupported="raise") as on:
        with pytest.raises(UnsupportedSetup, match=r"\[no-stage-groups\]; set tp_dp_cp"):
            _call_through_block(training, pg_collection=unknown)

    assert off.reports == []
    assert [report.outcome for report in on.reports] == ["skipped"]


@ranks(2)
def test_blocks_on_a_stack():
    """A block is an ordinary context manager."""
    training = pipeline()
    with ExitStack() as stack:
        warmup = stack.enter_context(pipeline_warmup())
        call(training)

    assert warmup.report.outcome == "warmed"
