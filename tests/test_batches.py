"""Each batch is fetched once, for the pass, and served again to the real schedule."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import rerun_state_machine
from pipelines import SMALL, VIRTUAL, call, pipeline, start_anew
from torch.utils.data import DataLoader

from pp_free_warmup import in_warmup, pipeline_warmup
from pp_free_warmup._batches import Batches, counts_itself, is_readable
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._random import CallerRandom
from pp_free_warmup.testing import models, ranks


class Counted:
    """An iterator that counts how often it was asked, and has something of its own."""

    def __init__(self, n: int = 4) -> None:
        self.items = [{"tokens": torch.full((2,), i)} for i in range(n)]
        self.asked = 0
        self.extra = "mine"

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self.asked == len(self.items):
            raise StopIteration
        self.asked += 1
        return self.items[self.asked - 1]


class CountsItself:
    """An iterator as slime and miles have it: no ``__next__``, a position of its own, a reset."""

    def __init__(self) -> None:
        self.rollout_data = {"tokens": [torch.full((2,), i) for i in range(4)]}
        self.offset = 0
        self.resets = 0

    def get_next(self, keys: list[str]) -> dict[str, Any]:
        """Return the next items under *keys*."""
        self.offset += 1
        return {key: [self.rollout_data[key][self.offset - 1]] for key in keys}

    def reset(self) -> None:
        """Start again, which a warmup must never do."""
        self.resets += 1
        self.offset = 0


def _batches(data: Any, chunks: int = 1) -> Batches:
    listed = isinstance(data, list | tuple) and len(data) == chunks
    return Batches(
        ScheduleCall(
            keywords={"data_iterator": data},
            chunks=(),
            iterators=tuple(data) if listed else (data,) * chunks,
            config=None,
            groups=None,
            interleaved=chunks > 1,
            random=CallerRandom(),
        )
    )


def _values(iterator: Iterator[Any]) -> list[int]:
    return [int(batch["tokens"][0]) for batch in iterator]


def test_the_pass_sees_the_first_batch():
    """What the pass reads is what the real schedule would have read first."""
    batches = _batches(Counted())

    assert next(batches.for_pass(0))["tokens"].tolist() == [0, 0]


def test_the_real_schedule_sees_every_batch_in_order():
    """The fetched batches come first, then the rest: nothing is lost and nothing comes twice."""
    source = Counted()
    batches = _batches(source)
    read = batches.for_pass(0)
    next(read)
    next(read)

    assert _values(batches.for_schedule()) == [0, 1, 2, 3]
    assert source.asked == 4


def test_the_real_schedule_gets_the_very_item():
    """Not a copy: a rerun or a cache of the trainer may compare it by identity."""
    source = Counted()
    batches = _batches(source)
    next(batches.for_pass(0))

    assert next(batches.for_schedule()) is source.items[0]


def test_what_the_pass_writes_into_a_batch_stays_in_the_pass():
    """Forward steps edit batches in place; the real one finds them untouched."""
    batches = _batches(Counted())
    batch = next(batches.for_pass(0))
    batch["tokens"].fill_(99)
    batch["position_ids"] = batch.pop("tokens")

    served = next(batches.for_schedule())

    assert list(served) == ["tokens"]
    assert served["tokens"].tolist() == [0, 0]


def test_nothing_is_fetched_before_it_is_asked_for():
    """A stage whose forward step reads no data leaves its iterator alone, and gets it back as it is."""
    source = Counted()
    batches = _batches(source)
    batches.for_pass(0)

    assert source.asked == 0
    assert batches.for_schedule() is source


def test_a_list_in_which_nothing_was_fetched_is_the_very_list():
    """The caller's list is passed on, not one like it."""
    passed = [Counted(), None]

    assert _batches(passed, 2).for_schedule() is passed


def test_none_stays_none():
    """A stage or chunk without data gets None, in the pass and in the real schedule."""
    source = Counted()
    alone, listed = _batches(None), _batches([None, source], 2)
    next(listed.for_pass(1))

    assert alone.for_pass(0) is None
    assert alone.for_schedule() is None
    assert listed.for_pass(0) is None
    assert listed.for_schedule()[0] is None
    assert _values(listed.for_schedule()[1]) == [0, 1, 2, 3]


@pytest.mark.parametrize("container", [list, tuple])
def test_each_chunk_has_its_own_iterator(container):
    """With one iterator per chunk, each chunk gets back what was fetched for it, in the same kind of container."""
    sources = [Counted(), Counted(), Counted()]
    batches = _batches(container(sources), 3)
    next(batches.for_pass(0))
    next(batches.for_pass(2))

    served = batches.for_schedule()

    assert type(served) is container
    assert served[1] is sources[1]
    assert [_values(iterator) for iterator in served] == [[0, 1, 2, 3]] * 3


def test_a_list_of_one_stays_a_list_of_one():
    """Trainers pass a list also where there is one chunk."""
    batches = _batches([Counted()])
    next(batches.for_pass(0))

    assert isinstance(batches.for_schedule(), list)
    assert _values(batches.for_schedule()[0]) == [0, 1, 2, 3]


def test_a_tuple_for_one_chunk_is_passed_whole():
    """A tuple that the forward step itself takes apart is left as it is."""
    pair = (Counted(), Counted())

    assert _batches(pair).for_schedule() is pair
    assert not is_readable(pair)


def test_an_iterator_that_chunks_share_is_recorded_once():
    """Two chunks read on from each other, and the real schedule reads all of it again in that order."""
    source = Counted()
    batches = _batches([source, source], 2)
    first, second = next(batches.for_pass(0)), next(batches.for_pass(1))

    served = batches.for_schedule()

    assert (int(first["tokens"][0]), int(second["tokens"][0])) == (0, 1)
    assert batches.fetched == 2
    assert [int(next(served[i])["tokens"][0]) for i in (0, 1, 0, 1)] == [0, 1, 2, 3]


def test_the_iterators_own_attributes_are_reached():
    """What else a forward step asks its iterator for comes from the caller's object, before and after."""
    source = Counted()
    batches = _batches(source)
    next(batches.for_pass(0))

    assert batches.for_pass(0).extra == "mine"
    assert batches.for_schedule().extra == "mine"
    assert not hasattr(batches.for_pass(0), "missing")
    assert not hasattr(batches.for_schedule(), "missing")


def test_both_are_iterators():
    """A forward step may loop over its data, and take ``iter()`` of it."""
    batches = _batches(Counted())
    read = batches.for_pass(0)
    for _ in read:
        break
    served = batches.for_schedule()

    assert iter(read) is read
    assert iter(served) is served


def test_an_exhausted_iterator_is_noticed():
    """The end of the data reaches the forward step as usual, and is remembered for the error."""
    batches = _batches(Counted(0))

    with pytest.raises(StopIteration):
        next(batches.for_pass(0))

    assert batches.exhausted
    assert batches.fetched == 0


def test_fetched_batches_are_counted_until_they_are_served():
    """The count says what would be lost if the real schedule never ran."""
    batches = _batches(Counted())
    assert (batches.fetched, batches.exhausted) == (0, False)
    next(batches.for_pass(0))
    assert batches.fetched == 1
    next(batches.for_schedule())
    assert batches.fetched == 0


def test_an_iterator_that_counts_itself_runs_itself():
    """Slime's and miles' object is handed to the pass and to the schedule, never a stand-in."""
    source = CountsItself()
    batches = _batches([source])

    assert batches.for_pass(0) is source
    with batches.rewound():
        batches.for_pass(0).get_next(["tokens"])
        assert source.offset == 1

    assert source.offset == 0
    assert batches.for_schedule()[0] is source
    assert source.resets == 0


def test_an_iterator_that_counts_itself_keeps_its_place_within_a_rollout():
    """The position goes back to where it was, not to zero, and added fields go away."""
    source = CountsItself()
    source.get_next(["tokens"])
    batches = _batches([source])

    with batches.rewound():
        source.get_next(["tokens"])
        source.seen = True

    assert (source.offset, source.resets) == (1, 0)
    assert not hasattr(source, "seen")


def test_an_iterator_that_counts_itself_is_put_back_after_an_error():
    """A forward step that raises leaves the position where it was."""
    source = CountsItself()

    with pytest.raises(ValueError, match="stop"), _batches([source]).rewound():
        source.get_next(["tokens"])
        raise ValueError("stop")

    assert source.offset == 0


def test_chunks_with_positions_of_their_own_are_each_put_back():
    """With virtual stages each chunk's iterator has its own position over shared data."""
    sources = [CountsItself(), CountsItself()]
    batches = _batches(sources, 2)

    with batches.rewound():
        sources[0].get_next(["tokens"])
        sources[1].get_next(["tokens"])
        sources[1].get_next(["tokens"])

    assert [source.offset for source in sources] == [0, 0]


def test_what_can_be_read():
    """An iterator, None and what counts itself can be read; a loader or a list of batches cannot."""
    both = type("Both", (CountsItself,), {"__next__": lambda self: None})()

    assert all(map(is_readable, (None, Counted(), CountsItself(), iter([1]), both)))
    assert not any(map(is_readable, ([1], {"a": 1}, DataLoader([1]))))
    assert counts_itself(both)  # asked for first: such an object reads from its own position
    assert not counts_itself(Counted())
    assert not is_readable(type("Half", (), {"get_next": None})())


def test_a_rerun_iterator_remembers_each_batch_once():
    """Megatron's own replaying iterator sees one fetch per batch, and rewinds to the same ones."""
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    try:
        source = rerun_state_machine.RerunDataIterator(iter(Counted(3).items))
        batches = _batches(source)
        next(batches.for_pass(0))

        first = [next(served)["tokens"].tolist() for served in [batches.for_schedule()] for _ in range(3)]
        remembered = len(source.saved_microbatches)
        source.rewind()
        again = [next(source)["tokens"].tolist() for _ in range(3)]
    finally:
        rerun_state_machine.destroy_rerun_state_machine()

    assert remembered == 3
    assert first == again == [[0, 0], [1, 1], [2, 2]]


# --- the caller's random numbers --------------------------------------------------------------------------------------


def _seed() -> None:
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 - the global generator is what trainers use
    torch.manual_seed(5)


def _shuffled() -> Iterator[Any]:
    """Draw from all three global generators: at the first batch (the order), and at each one."""
    for batch in DataLoader(list(range(8)), batch_size=2, shuffle=True):
        yield batch.tolist(), random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def _later() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def test_a_shuffling_loader_draws_what_it_would_have_drawn():
    """Order, values and all later random numbers are those of a run without a warmup."""
    _seed()
    cold = [*_shuffled()], _later()

    _seed()
    batches = _batches(_shuffled())
    caller = batches._sources[id(batches._passed)]._random
    caller.read()
    torch.rand(3), random.random()  # the pass draws by itself, before and after its first fetch
    next(batches.for_pass(0))
    torch.rand(5), np.random.rand(3)  # noqa: NPY002
    caller.set()
    warmed = [*batches.for_schedule()], _later()

    assert warmed == cold


def test_iterators_that_draw_are_counted():
    """Several of them on one rank may draw in another order than without a warmup, which the log then says."""
    batches = _batches([_shuffled(), iter([1]), _shuffled()], chunks=3)
    random_of_caller = next(iter(batches._sources.values()))._random
    random_of_caller.read()
    for chunk in range(3):
        next(batches.for_pass(chunk))
    random_of_caller.set()

    assert batches.drawing == 2


def test_the_pass_continues_its_own_random_numbers_after_a_fetch():
    """What the pass draws does not depend on what its data drew."""
    _seed()
    batches = _batches(_shuffled())
    caller = batches._sources[id(batches._passed)]._random
    caller.read()
    torch.manual_seed(7)
    next(batches.for_pass(0))
    drawn = float(torch.rand(()))
    caller.set()

    torch.manual_seed(7)
    assert drawn == float(torch.rand(()))


def test_the_end_of_the_data_keeps_the_random_numbers_in_order():
    """An iterator that draws and then ends leaves the caller's state after that draw."""

    def ends() -> Iterator[Any]:
        torch.rand(1)
        yield from ()

    _seed()
    assert [*ends()] == []
    cold = _later()

    _seed()
    batches = _batches(ends())
    caller = batches._sources[id(batches._passed)]._random
    caller.read()
    with pytest.raises(StopIteration):
        next(batches.for_pass(0))
    caller.set()

    assert _later() == cold


# --- the caller's iterator stays the caller's -------------------------------------------------------------------------


class Loader:
    """A loader of a trainer's own: a position, a log, counters, private generators, a way to look ahead."""

    def __init__(self, items: Any) -> None:
        self.items = items
        self.position = 0
        self.starts: list[int] = []
        self.log: list[int] = []
        self.seen: dict[str, Any] = {"steps": deque(maxlen=3), "tokens": 0}
        self.tokens_seen = 0
        self.ticks = torch.zeros((), dtype=torch.int64)
        self.drawn = random.Random(1)
        self.augment = {"numpy": np.random.default_rng(2), "torch": torch.Generator().manual_seed(3)}
        self.entered = 0

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Loader:
        return self

    def __enter__(self) -> Loader:
        self.entered += 1
        return self

    def __exit__(self, *error: object) -> None:
        """Leave nothing behind."""

    def __next__(self) -> Any:
        if self.position == 0:
            self.starts.append(self.tokens_seen)
        self.log.append(self.position)
        self.seen["fetched"] = [self.position, self.drawn.random()]
        self.position += 1
        return self.items[self.position - 1]

    def peek(self) -> Any:
        """Return the next batch without taking it."""
        return self.items[self.position]


class Slotted(Loader):
    """The same with the position in a slot, and a name that only its class knows."""

    __slots__ = ("__hidden", "position")


class Ahead(Loader):
    """A loader that draws a batch ahead of time."""

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.ahead: deque[Any] = deque()

    def peek(self) -> Any:
        """Fill the buffer, and return its first batch."""
        if not self.ahead:
            self.ahead.append(super().__next__())
        return self.ahead[0]

    def __next__(self) -> Any:
        return self.ahead.popleft() if self.ahead else super().__next__()


def _uses(told: list[Any]) -> Any:
    """Return a forward step that treats its iterator as its own loader, and tells what it sees for real."""

    def step(iterator: Any, chunk: Any, **more: Any) -> Any:
        if iterator is None:
            return models.forward_step(iterator, chunk, **more)
        assert isinstance(iterator, Loader)
        with iterator as entered:
            seen = [iterator.position, len(entered), bool(entered), int(entered.peek()["tokens"].sum())]
            output = models.forward_step(entered, chunk, **more)
        iterator.tokens_seen += 8
        iterator.last = iterator.position
        iterator.ticks += 1
        iterator.seen["steps"].append(iterator.position)
        iterator.seen["tokens"] += 8
        drawn = [float(iterator.augment["numpy"].random()), float(torch.rand((), generator=iterator.augment["torch"]))]
        if not in_warmup():
            told.append([*seen, *drawn, iterator.drawn.random(), int(iterator.peek()["tokens"].sum())])
        return output

    return step


def _own(loader: Any) -> dict[str, Any]:
    own = {name: value for name, value in vars(loader).items() if name not in ("items", "drawn", "augment", "ahead")}
    generators = loader.drawn.random(), float(loader.augment["numpy"].random())
    return own | {
        "position": loader.position,
        "torch": torch.rand(2, generator=loader.augment["torch"]).tolist(),
        "ticks": int(loader.ticks),
        "generators": generators,
    }


@ranks(2)
@pytest.mark.parametrize("kind", [Loader, Slotted, Ahead])
@pytest.mark.parametrize("layout", [SMALL, VIRTUAL], ids=["one chunk", "two chunks"])
def test_a_loader_of_ones_own_cannot_tell(kind, layout):
    """Class, length, fields, generators and what it looks ahead at are at every real step those of a run without."""
    runs = []
    for warmed in (False, True):
        start_anew(layout)
        training = pipeline(layout)
        told: list[Any] = []
        training.forward_step = _uses(told)
        training.iterators = [each and kind([next(each) for _ in range(8)]) for each in training.iterators]
        losses = []
        for _ in range(2):
            if warmed:
                with pipeline_warmup() as warmup:
                    losses += [float(loss["lm loss"][0]) for loss in training.step().losses]
                assert warmup.reports == [] or warmup.report.outcome == "warmed"
            else:
                losses += [float(loss["lm loss"][0]) for loss in training.step().losses]
        runs.append((losses, told, [_own(each) for each in training.iterators if each]))

    assert runs[0] == runs[1]


def test_a_second_pass_reads_the_same_batches_and_then_on():
    """Each pass starts at the first batch, with the iterator as it was; the schedule then reads each batch once."""
    source = Loader(Counted().items)
    batches, seen = _batches(source), []
    with batches.rewound():
        for length in (1, 3):
            batches.begin_pass()
            view = batches.for_pass(0)
            for _ in range(length):
                seen.append((view.position, int(next(view)["tokens"].fill_(9)[0]), view.tokens_seen))
                view.tokens_seen += 8
    before = source.position, source.log, source.tokens_seen
    served = batches.for_schedule()

    assert seen == [(0, 9, 0), (0, 9, 0), (1, 9, 8), (2, 9, 16)]
    assert before == (0, [], 0)
    assert [(served.position, int(next(served)["tokens"][0])) for _ in range(4)] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert source.log == [0, 1, 2, 3]


def test_a_second_pass_of_an_iterator_that_counts_itself_starts_where_the_first_did():
    """Such an iterator runs itself in each pass."""
    source = CountsItself()
    batches = _batches([source])
    with batches.rewound():
        for _ in range(2):
            batches.begin_pass()
            assert batches.for_pass(0).get_next(["tokens"])["tokens"][0].tolist() == [0, 0]

    assert source.offset == 0


def test_what_an_iterator_that_counts_itself_holds_is_put_back():
    """Lists, dicts, sets and deques at any depth, and private generators, end as they were."""
    source = CountsItself()
    source.log = [0]
    source.deep = {"epochs": [{"seen": {1}, "last": deque([1], maxlen=2)}]}
    source.generator = torch.Generator().manual_seed(1)
    source.order = {"shuffle": random.Random(1), "numpy": np.random.RandomState(3)}
    expected = _drawn(source)
    source.generator.manual_seed(1)
    source.order["shuffle"].seed(1)
    source.order["numpy"].seed(3)

    with _batches([source]).rewound():
        source.log.append(source.get_next(["tokens"]))
        source.deep["epochs"][0]["seen"].add(2)
        source.deep["epochs"][0]["last"].extend([2, 3])
        source.deep["epochs"].append({})
        _drawn(source)

    assert (source.log, source.deep) == ([0], {"epochs": [{"seen": {1}, "last": deque([1])}]})
    assert _drawn(source) == expected


def _drawn(source: Any) -> tuple[float, ...]:
    order = source.order
    return float(torch.rand((), generator=source.generator)), order["shuffle"].random(), order["numpy"].rand()


class Prefetching:
    """A loader whose buffer a thread fills at any time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.buffer = deque([{"tokens": torch.full((1,), 0)}])
        self.count = 0

    def fill(self, number: int) -> None:
        """Stand for what the thread does."""
        self.buffer.append({"tokens": torch.full((1,), number)})

    def __next__(self) -> Any:
        return self.buffer.popleft()


def test_what_a_thread_writes_is_left_alone():
    """A batch that a prefetcher has put into its buffer meanwhile is not lost; what the pass assigns is put back."""
    source = Prefetching()
    batches = _batches(source)
    with batches.rewound():
        view = batches.for_pass(0)
        next(view)
        view.count += 1
        view.added = 1
        source.fill(1)
    served = batches.for_schedule()
    source.fill(2)

    assert [int(next(served)["tokens"]) for _ in range(3)] == [0, 1, 2]
    assert source.count == 0
    assert not hasattr(source, "added")


def test_an_error_of_the_iterator_comes_again():
    """An iterator that fails once has failed for the real schedule, which says it in its own words."""

    def fails() -> Iterator[Any]:
        yield {"tokens": torch.zeros(1)}
        raise ValueError("bad shard")

    batches = _batches(fails())
    view = batches.for_pass(0)
    next(view)
    with pytest.raises(ValueError, match="bad shard"):
        next(view)
    assert batches.fetched == 1
    served = batches.for_schedule()
    next(served)
    with pytest.raises(ValueError, match="bad shard"):
        next(served)
    with pytest.raises(StopIteration):
        next(served)


class Sample:
    """A batch as a plain class."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens
        self.meta = {"edits": [0]}


@ranks(2)
def test_a_batch_of_a_plain_class_may_be_edited():
    """What a forward step writes into its batch in the pass is not there in the real step."""

    def step(iterator: Any, chunk: Any) -> Any:
        batch = next(iterator)
        batch["sample"].tokens += 1
        batch["sample"].meta["edits"][0] += 1
        if not in_warmup():
            told.append((batch["sample"].tokens.tolist(), batch["sample"].meta))
        return models.forward_step(iter([batch]), chunk)

    training, told = pipeline(), []
    training.forward_step = step
    items = [next(training.iterators[0]) | {"sample": Sample(torch.zeros(2))} for _ in range(2)]
    with pipeline_warmup() as warmup:
        call(training, data_iterator=iter(items))

    assert warmup.report.outcome == "warmed"
    assert told == [([1.0, 1.0], {"edits": [1]})] * 2
