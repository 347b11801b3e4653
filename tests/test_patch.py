"""The schedules are stood in for while a block is armed, and the very same objects come back."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.pipeline_parallel import combined_1f1b, get_forward_backward_func, schedules
from pipelines import SMALL, VIRTUAL, call, pipeline

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import _origin, _patch, pipeline_warmup, warm_first_call
from pp_free_warmup._megatron import REQUIRED_KEYWORDS, SCHEDULE_NAMES, foreign_code, origin
from pp_free_warmup._undo import swapped
from pp_free_warmup.errors import UnsupportedMegatron, UnsupportedSetup, WrongCall
from pp_free_warmup.testing import cuda_on_cpu, ranks


class Block:
    """An armed block that notes which calls reached it, and lets them go no further."""

    def __init__(self, mine: object = None) -> None:
        self.mine = mine
        self.seen: list[dict[str, Any]] = []
        self.called = False
        self.passed = 0
        self.reports: list[Any] = []

    def takes(self, keywords: dict[str, Any]) -> bool:
        """Take the calls of its own model, or all."""
        return self.mine is None or keywords["model"] is self.mine

    def passed_by(self) -> None:
        """Note that a step ran past."""
        self.passed += 1

    def run(self, schedule: Any, keywords: dict[str, Any]) -> str:
        """Note the call."""
        self.seen.append(keywords)
        return f"{schedule.__name__} ran in a block"


@pytest.fixture(autouse=True)
def schedules_come_back():
    """Whatever a test does, the module ends as it began."""
    before = [getattr(schedules, name) for name in (*SCHEDULE_NAMES, "forward_step")]
    yield
    after = [getattr(schedules, name) for name in (*SCHEDULE_NAMES, "forward_step")]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert _patch.armed() == []


@pytest.fixture
def stages(monkeypatch):
    """Let `get_forward_backward_func` choose as with this many stages and virtual stages."""

    def choose(pipeline: int, virtual: int | None = None) -> None:
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: pipeline)
        monkeypatch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: virtual)

    return choose


def _call(function: Any, **keywords: Any) -> Any:
    return function(**{**dict.fromkeys(REQUIRED_KEYWORDS), **keywords})


def _originals() -> list[Any]:
    return [getattr(schedules, name) for name in SCHEDULE_NAMES]


@pytest.mark.parametrize(("pipeline", "virtual", "chosen"), [(1, None, 0), (2, 2, 1), (2, None, 2)])
def test_whatever_megatron_chooses_is_reached(stages, pipeline, virtual, chosen):
    """All three schedules arrive at the block, fetched the way every trainer fetches them."""
    stages(pipeline, virtual)
    block = Block()
    _patch.arm(block)
    try:
        answer = _call(get_forward_backward_func(), num_microbatches=3)
    finally:
        _patch.disarm(block, 1)

    assert answer == f"{SCHEDULE_NAMES[chosen]} ran in a block"
    assert block.seen[0]["num_microbatches"] == 3


def test_the_very_same_objects_come_back():
    """Not equal ones: a wrapt wrapper equals what it wraps."""
    before = _originals()
    block = Block()
    _patch.arm(block)
    during = _originals()
    _patch.disarm(block, 1)

    assert all(a is not b for a, b in zip(before, during, strict=True))
    assert all(a is b for a, b in zip(before, _originals(), strict=True))


def test_a_wrapper_looks_like_the_schedule():
    """Name, signature and doc are the schedule's."""
    before = _originals()
    block = Block()
    _patch.arm(block)
    during = _originals()
    _patch.disarm(block, 1)

    for wrapper, original in zip(during, before, strict=True):
        assert wrapper.__name__ == original.__name__
        assert wrapper.__doc__ == original.__doc__
        assert inspect.signature(wrapper) == inspect.signature(original)


@pytest.mark.parametrize("leaving", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_blocks_leave_in_any_order(leaving):
    """The patch stays as long as any block is armed, and goes with the last one."""
    before, blocks = _originals(), [Block(), Block(), Block()]
    for block in blocks:
        _patch.arm(block)
    patched = _originals()
    for place in leaving:
        assert all(a is b for a, b in zip(patched, _originals(), strict=True))
        _patch.disarm(blocks[place], 1)

    assert all(a is b for a, b in zip(before, _originals(), strict=True))


def test_a_block_may_be_armed_twice():
    """A decorated function that calls itself arms its block again; the inner end does not disarm the outer."""
    block = Block()
    _patch.arm(block)
    _patch.arm(block)
    _patch.disarm(block, 1)
    _call(schedules.forward_backward_no_pipelining)
    _patch.disarm(block, 1)

    assert len(block.seen) == 1


def test_leaving_without_being_armed_changes_nothing():
    """A block that never entered, or left already, can leave again."""
    block, stranger = Block(), Block()
    _patch.disarm(stranger, 1)
    _patch.arm(block)
    _patch.disarm(stranger, 1)
    assert _patch.armed() == [block]
    _patch.disarm(block, 1)
    _patch.disarm(block, 1)


def test_the_innermost_block_of_the_model_gets_the_call():
    """Of several blocks that take a call, the one that was opened last does; others are asked in turn."""
    actor, critic = object(), object()
    outer, inner = Block(), Block(critic)
    _patch.arm(outer)
    _patch.arm(inner)
    _call(schedules.forward_backward_no_pipelining, model=critic)
    _call(schedules.forward_backward_no_pipelining, model=actor)
    _patch.disarm(inner, 1)
    _patch.disarm(outer, 1)

    assert [seen["model"] for seen in inner.seen] == [critic]
    assert [seen["model"] for seen in outer.seen] == [actor]


def test_a_call_that_no_block_takes_goes_straight_to_the_schedule(monkeypatch):
    """Another model's call runs as if there were no block."""
    monkeypatch.setattr(schedules, SCHEDULE_NAMES[0], _stand_in)
    block = Block(mine=object())
    _patch.arm(block)
    answer = _call(schedules.forward_backward_no_pipelining, model=None)
    _patch.disarm(block, 1)

    assert answer == "the schedule itself"
    assert block.seen == []


def _stand_in(*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size) -> str:
    """Stand for a schedule."""
    return "the schedule itself"


def test_a_wrapper_that_outlives_its_block_passes_calls_through(monkeypatch):
    """A trainer that keeps the function it fetched in a block gets the plain schedule from it, later too."""
    monkeypatch.setattr(schedules, SCHEDULE_NAMES[0], _stand_in)
    block, later = Block(), Block()
    _patch.arm(block)
    kept = schedules.forward_backward_no_pipelining
    _patch.disarm(block, 1)
    assert _call(kept) == "the schedule itself"
    with pytest.raises(TypeError, match="takes 0 positional arguments"):  # Python's own words, not ours
        kept(1)
    _patch.arm(later)
    assert _call(kept) == "the schedule itself"
    _patch.disarm(later, 1)

    assert block.seen == later.seen == []


def test_a_wrapper_that_outlives_its_block_keeps_nothing_alive():
    """The block, and so whatever it refers to, can go while the trainer keeps the function."""
    block = Block(mine=object())
    _patch.arm(block)
    kept = schedules.forward_backward_no_pipelining
    _patch.disarm(block, 1)
    gone = weakref.ref(block)

    del block
    gc.collect()

    assert gone() is None
    assert kept.__name__ == "forward_backward_no_pipelining"


def test_another_patch_on_top_is_kept_with_a_warning():
    """What somebody else put over the wrapper meanwhile stays, and is named in a warning at the user's line."""
    block = Block()
    original = schedules.forward_backward_no_pipelining
    _patch.arm(block)
    ours = schedules.forward_backward_no_pipelining

    def theirs(**keywords: Any) -> Any:
        return ("theirs", ours(**keywords))

    schedules.forward_backward_no_pipelining = theirs
    answer = _call(schedules.forward_backward_no_pipelining)
    with pytest.warns(RuntimeWarning, match="forward_backward_no_pipelining in megatron.* was replaced") as caught:
        _leave(block)
    after, schedules.forward_backward_no_pipelining = schedules.forward_backward_no_pipelining, original

    assert answer == ("theirs", f"{SCHEDULE_NAMES[0]} ran in a block")
    assert caught[0].filename == __file__
    assert after is theirs


def _leave(block: Block) -> None:
    """Stand for ``__exit__``, which lies between a block's end and the user's line."""
    _patch.disarm(block, 2)


def test_a_block_over_another_patch_gives_that_patch_back(monkeypatch):
    """A patch that was there before is the original that comes back."""

    def theirs(*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size) -> str:
        return "theirs"

    monkeypatch.setattr(schedules, "forward_backward_no_pipelining", theirs)
    block = Block()
    _patch.arm(block)
    assert _patch.original_of(theirs) is theirs
    _patch.disarm(block, 1)

    assert schedules.forward_backward_no_pipelining is theirs


def test_an_original_is_known_by_identity():
    """In and out of a block, Megatron's functions are themselves, and wrappers of them are not."""
    original = schedules.forward_backward_no_pipelining
    assert _patch.original_of(original) is original
    block = Block()
    _patch.arm(block)
    wrapper = schedules.forward_backward_no_pipelining
    assert wrapper == original
    assert _patch.original_of(original) is original
    assert _patch.original_of(wrapper) is None
    assert _patch.original_of(print) is None
    _patch.disarm(block, 1)


def _noted_steps(monkeypatch: Any) -> list[int]:
    """Put a step in Megatron's place that only notes what it is called with."""
    steps: list[int] = []

    @functools.wraps(schedules.forward_step)
    def step(number: int) -> None:
        steps.append(number)

    monkeypatch.setattr(schedules, "forward_step", step)
    return steps


def test_a_step_past_an_armed_block_is_noticed_once(monkeypatch):
    """The first step of a schedule that nobody reached tells the block; after it the name is Megatron's own again."""
    steps = _noted_steps(monkeypatch)
    own = schedules.forward_step
    block = Block()
    _patch.arm(block)
    for number in range(3):
        schedules.forward_step(number)
    watched = schedules.forward_step
    _patch.disarm(block, 1)

    assert steps == [0, 1, 2]
    assert block.passed == 1
    assert watched is own


@pytest.mark.parametrize("reached", [_patch.reached, lambda: _call(schedules.forward_backward_no_pipelining)])
def test_nothing_is_watched_once_a_schedule_was_reached(monkeypatch, reached):
    """A schedule that was reached, through whichever door, ends the watch before its first step."""
    steps = _noted_steps(monkeypatch)
    own = schedules.forward_step
    block = Block()
    _patch.arm(block)
    reached()
    watched = schedules.forward_step
    schedules.forward_step(1)
    _patch.disarm(block, 1)

    assert watched is own
    assert (steps, block.passed) == ([1], 0)


def test_a_step_that_another_party_wraps_meanwhile_is_left_to_them(monkeypatch):
    """Their wrapper stays, and what is watched underneath only passes on."""
    steps = _noted_steps(monkeypatch)
    own = schedules.forward_step
    block = Block()
    _patch.arm(block)
    ours = schedules.forward_step

    def theirs(number: int) -> None:
        ours(number)

    schedules.forward_step = theirs
    _patch.disarm(block, 1)
    schedules.forward_step(1)
    kept = schedules.forward_step is theirs
    schedules.forward_step = own

    assert kept
    assert (steps, block.passed) == ([1], 0)


def test_positional_arguments_are_refused_in_a_block():
    """The model cannot be told from the data then."""
    block = Block()
    _patch.arm(block)
    with pytest.raises(WrongCall, match="called with positional arguments"):
        schedules.forward_backward_no_pipelining(1, 2)
    _patch.disarm(block, 1)

    assert block.seen == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (schedules, "forward_step"),
        (schedules, "backward_step"),
        (schedules, "get_tensor_shapes"),
        (schedules, SCHEDULE_NAMES[1]),
        (combined_1f1b, "combined_forward_backward_step"),
    ],
)
def test_an_unknown_layout_stops_the_block_before_anything_is_patched(monkeypatch, module, name):
    """A function that wants something new is named; the schedules stay as they are."""

    def newer(*arguments: Any, unheard_of: int, **keywords: Any) -> None:
        """Stand for a function of a later Megatron."""

    monkeypatch.setattr(module, name, newer)
    before, block = _originals(), Block()
    with pytest.raises(UnsupportedMegatron, match=f"{name} has an unknown form"):
        _patch.arm(block)

    assert all(a is b for a, b in zip(before, _originals(), strict=True))
    assert _patch.armed() == []


def test_a_layout_is_read_again_once_it_changed(monkeypatch):
    """A function that is replaced between two blocks is checked in the second one."""
    block = Block()
    _patch.arm(block)
    _patch.disarm(block, 1)
    monkeypatch.delattr(schedules, "backward_step")

    with pytest.raises(UnsupportedMegatron, match="schedules.backward_step"):
        _patch.arm(block)


# --- whose code a schedule is -----------------------------------------------------------------------------------------


def zero_bubble(**keywords: Any) -> str:
    """Stand for another party's schedule."""
    return "bubbles"


def _itself(schedule: Any) -> Any:
    return schedule


def _kept(schedule: Any) -> Any:
    with cuda_on_cpu():
        return FullCudaGraphWrapper(schedule)


def _timed(schedule: Any) -> Any:
    @functools.wraps(schedule)
    def timed(**keywords: Any) -> Any:
        return schedule(**keywords)

    return timed


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize(
    "dressed",
    [
        _itself,
        _timed,
        lambda own: _timed(_timed(own)),
        warm_first_call,
        functools.partial,
        _kept,
    ],
    ids=["itself", "a decorator", "two decorators", "ours", "a partial", "a keeper"],
)
def test_megatrons_own_schedules_are_known_through_thin_wrappers(name, dressed):
    """Timers, ranges, graphs and our own wrappers make no schedule another party's."""
    assert foreign_code(dressed(getattr(schedules, name))) == ""


@pytest.mark.parametrize("dressed", [_itself, _timed, warm_first_call], ids=["bare", "timed", "ours"])
def test_another_partys_schedule_is_told_by_where_it_is_defined(dressed):
    """Its module, name, file and line are named, through wrappers of it too."""
    line = zero_bubble.__code__.co_firstlineno

    assert foreign_code(dressed(zero_bubble)) == f"{__name__}.zero_bubble, {__file__}:{line}"


def test_code_that_was_written_into_megatrons_module_is_not_megatrons():
    """A rewritten source runs in Megatron's module, but is not in its file."""
    rewritten: dict[str, Any] = {"__name__": schedules.__name__}
    exec("def forward_backward_no_pipelining(**keywords): pass", rewritten)

    assert "<string>:1" in foreign_code(rewritten["forward_backward_no_pipelining"])


@contextmanager
def _theirs(name: str, dressed: Any) -> Iterator[list[str]]:
    """Bind something else under a schedule's name, and collect what the library logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pp_free_warmup").addHandler(handler)
    original = getattr(schedules, name)
    try:
        with swapped(schedules, name, dressed(original)), swapped(_origin, "_said", set()):
            yield lines
    finally:
        logging.getLogger("pp_free_warmup").removeHandler(handler)


def _rebuilt(own: Any) -> Any:
    def replacement(
        *, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, **more
    ) -> Any:
        return own(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            **more,
        )

    return replacement


@ranks(2)
@pytest.mark.parametrize("layout", [SMALL, VIRTUAL], ids=["1f1b", "interleaved"])
def test_a_foreign_schedule_is_warmed_and_warned_of_once(layout):
    """The run goes on; one rank says, once for both kinds of call, what was found under the name, and where."""
    training = pipeline(layout)
    name = SCHEDULE_NAMES[1 if layout.vp else 2]
    with _theirs(name, _rebuilt) as lines:
        with pipeline_warmup() as warmup:
            call(training)
            call(training, forward_only=True)
        with pipeline_warmup():
            call(pipeline(layout))

    told = [line for line in lines if "not Megatron's own" in line]
    assert [report.outcome for report in warmup.reports] == ["warmed", "warmed"]
    assert len(told) == (1 if dist.get_rank() == 0 else 0)
    assert all(f"_rebuilt.<locals>.replacement, {__file__}:" in line for line in told)


@ranks(2)
@pytest.mark.parametrize("dressed", [_itself, _timed], ids=["itself", "decorated"])
def test_megatrons_own_schedule_is_warmed_without_a_warning(dressed):
    """Neither Megatron's schedule nor a timer around it is anything to warn of."""
    training = pipeline()
    with _theirs(SCHEDULE_NAMES[2], dressed) as lines, pipeline_warmup() as warmup:
        call(training)

    assert warmup.report.outcome == "warmed"
    assert not any("not Megatron's own" in line for line in lines)


# --- a release that was not tested ------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize(("choice", "lines_of_it"), [(None, 1), ("allow", 0)])
def test_an_untested_release_is_warmed(choice, lines_of_it, monkeypatch):
    """One line per process says so, on one rank, until it is insisted on."""
    monkeypatch.setattr(megatron, "untested_release", lambda: "0.99.0")
    monkeypatch.delenv("PP_FREE_WARMUP_UNTESTED", raising=False)
    if choice is not None:
        monkeypatch.setenv("PP_FREE_WARMUP_UNTESTED", choice)
    with _theirs(SCHEDULE_NAMES[2], _itself) as lines:
        for _ in range(2):
            with pipeline_warmup() as warmup:
                call(pipeline())

    told = [line for line in lines if "0.99.0 is not a tested release; its functions fit" in line]
    assert warmup.report.outcome == "warmed"
    assert len(told) == (lines_of_it if dist.get_rank() == 0 else 0)


@ranks(2)
def test_an_untested_release_that_one_rank_refuses_runs_cold(monkeypatch):
    """The run goes on without a warmup on all ranks, and the report names the refusal."""
    monkeypatch.setattr(megatron, "untested_release", lambda: "0.99.0")
    if dist.get_rank() == 1:
        monkeypatch.setenv("PP_FREE_WARMUP_UNTESTED", "refuse")
    training = pipeline()
    with pipeline_warmup() as warmup:
        call(training)

    assert warmup.report.outcome == "skipped"
    assert "[untested-megatron]" in warmup.report.reason
    assert training.forward_step.counts == (0, 2)


def test_an_unknown_choice_is_an_error_where_a_block_is_entered(monkeypatch):
    """What was given and what it takes are named; whoever switched the warmup off is left alone."""
    monkeypatch.setenv("PP_FREE_WARMUP_UNTESTED", "maybe")
    with pytest.raises(UnsupportedSetup, match='\'maybe\'; expected "allow" or "refuse".'), pipeline_warmup():
        pass
    with pipeline_warmup(enabled=False):
        pass


@pytest.mark.parametrize(("version", "told"), [("0.20.0+abc", "0.20.0"), ("0.19.2+abc", ""), ("0.16.1", "")])
def test_a_release_is_known_by_its_series(version, told, monkeypatch):
    """A commit behind a plus, which Megatron adds, makes no release another one."""
    monkeypatch.setattr(origin, "__version__", version)

    assert origin.untested_release() == told


def test_threads_arm_and_leave_together():
    """Blocks that come and go in several threads leave the schedules as they were."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threads = [threading.Thread(target=_come_and_go) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)


def _come_and_go() -> None:
    for _ in range(200):
        block = Block()
        _patch.arm(block)
        _patch.disarm(block, 1)
