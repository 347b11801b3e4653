"""Fetch each batch once, for the pass; serve the same batch again to the real schedule.

The pass gets a copy, since forward steps edit batches in place; the real
schedule gets the pristine item. Items are fetched only when a forward step asks,
and under the caller's random state, so that a shuffling loader draws what it
would have drawn without a warmup.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import wrapt

from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._copies import copy_of_batch
from pp_free_warmup._progress import Progress, is_written_by_others, own_state_kept
from pp_free_warmup._random import CallerRandom
from pp_free_warmup._undo import ABSENT


@dataclass(frozen=True, eq=False, slots=True)
class Fetch:
    """What one ``next()`` of the caller's iterator gave, and what it changed in the iterator's own fields."""

    item: Any
    error: Exception | None
    before: Progress | None
    after: Progress | None

    def again(self, give: Any) -> Any:
        """Change the iterator as the fetch did; return what *give* makes of the item, or raise."""
        if self.before is not None and self.after is not None:
            self.before.advance_to(self.after)
        if self.error is not None:
            raise self.error
        return give(self.item)


class Source:
    """One iterator of the caller's, with what was fetched from it; chunks may share it.

    Attributes:
        iterator: The caller's own.
        fetches: What was fetched, oldest first.
        draws: True once a fetch drew from the caller's random generators.
    """

    def __init__(self, iterator: Any, random: CallerRandom) -> None:
        self.iterator = iterator
        self.fetches: list[Fetch] = []
        self.draws = False
        self._random = random
        self._served = 0
        self._start: Progress | None = None
        self._is_shared = is_written_by_others(iterator)
        self._assigned: dict[str, Any] = {}

    @property
    def waiting(self) -> int:
        """Count the batches fetched that were not served again yet."""
        return sum(fetch.error is None for fetch in self.fetches)

    def start(self) -> None:
        """Remember the iterator's own fields: `begin` puts them back."""
        self._start = None if self._is_shared else Progress(self.iterator)

    def begin(self) -> None:
        """Start at the first batch again, with the iterator's fields as they were before any fetch."""
        self._served = 0
        if self._start is not None:
            self._start.put_back()
        for name, value in self._assigned.items():
            if value is not ABSENT:
                setattr(self.iterator, name, value)
            elif hasattr(self.iterator, name):
                delattr(self.iterator, name)
        self._assigned.clear()

    def assigns(self, name: str) -> None:
        """Remember the value of a field that the pass is about to write, where fields are not kept as a whole."""
        if self._is_shared:
            self._assigned.setdefault(name, getattr(self.iterator, name, ABSENT))

    def copied(self) -> Any:
        """Return a copy of the next batch, fetched only if no earlier pass has fetched it."""
        if self._served == len(self.fetches):
            self.fetches.append(self._fetch())
            fetch, give = self.fetches[-1], copy_of_batch
            self._served += 1
            if fetch.error is not None:
                raise fetch.error
            return give(fetch.item)
        self._served += 1
        return self.fetches[self._served - 1].again(copy_of_batch)

    def served(self) -> Any:
        """Return the very items that were fetched, then what the iterator has."""
        return self.fetches.pop(0).again(lambda item: item) if self.fetches else next(self.iterator)

    def _fetch(self) -> Fetch:
        item, error, draws = None, None, self._random.draws
        before = None if self._is_shared else Progress(self.iterator)
        with self._random.as_caller():
            try:
                item = next(self.iterator)
            except Exception as raised:  # noqa: BLE001 - raised again by whoever asks for this batch
                error = raised
        self.draws |= self._random.draws > draws
        return Fetch(item, error, before, None if self._is_shared else Progress(self.iterator))


class _View(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """The caller's iterator in everything but ``next()``: fetched batches first."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.iterator)
        self._self_source = source

    def __iter__(self) -> Any:
        iter(self.__wrapped__)  # it may count how often
        return self

    def __enter__(self) -> Any:
        entered = self.__wrapped__.__enter__()
        return self if entered is self.__wrapped__ else entered

    def __next__(self) -> Any:
        return self._self_source.served()


class _PassView(_View):
    def __next__(self) -> Any:
        return self._self_source.copied()

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith(("_self_", "__")):
            self._self_source.assigns(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._self_source.assigns(name)
        super().__delattr__(name)


def counts_itself(iterator: Any) -> bool:
    """Tell whether this is the iterator of slime or miles: ``get_next()`` and ``offset``, no ``__next__``."""
    return hasattr(iterator, "get_next") and hasattr(iterator, "offset")


def is_readable(iterator: Any) -> bool:
    """Tell whether the warmup knows how to read this data and put it back."""
    return iterator is None or counts_itself(iterator) or hasattr(iterator, "__next__")


class Batches:
    """The data of one schedule call, for the pass and for the real schedule after it.

    Args:
        call: Whose iterators to read. An iterator that several chunks share is recorded once.
    """

    def __init__(self, call: ScheduleCall) -> None:
        self._passed = call.keywords["data_iterator"]
        self._originals = call.iterators
        self._sources: dict[int, Source] = {
            id(iterator): Source(iterator, call.random)
            for iterator in call.iterators
            if iterator is not None and not counts_itself(iterator)
        }
        self._passes = ExitStack()

    def begin_pass(self) -> None:
        """Start a pass, the first or another one: it reads copies of what was fetched, then fetches on."""
        self._passes.close()
        for source in self._sources.values():
            source.begin()
        for iterator in {id(i): i for i in self._originals if counts_itself(i)}.values():
            self._passes.enter_context(own_state_kept(iterator))

    def for_pass(self, chunk: int) -> Any:
        """Return what the pass of this chunk reads from."""
        original = self._originals[chunk]
        source = self._sources.get(id(original))
        return original if source is None else _PassView(source)

    @property
    def exhausted(self) -> bool:
        """True when the pass asked an iterator for a batch that was not there."""
        fetches = (fetch for source in self._sources.values() for fetch in source.fetches)
        return any(isinstance(fetch.error, StopIteration) for fetch in fetches)

    @property
    def fetched(self) -> int:
        """Count the batches that the pass took from the caller's iterators and nobody got back yet."""
        return sum(source.waiting for source in self._sources.values())

    @property
    def drawing(self) -> int:
        """Count the caller's iterators that drew random numbers for what the pass took from them."""
        return sum(source.draws for source in self._sources.values())

    def for_schedule(self) -> Any:
        """Return ``data_iterator`` for the real call: the very objects passed where nothing was fetched."""
        served: dict[int, Any] = {key: _View(source) for key, source in self._sources.items() if source.fetches}
        if not served:
            return self._passed
        if isinstance(self._passed, (list, tuple)) and len(self._passed) == len(self._originals):
            return type(self._passed)(served.get(id(iterator), iterator) for iterator in self._passed)
        return served.get(id(self._passed), self._passed)

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Put what the iterators keep about themselves back after the block.

        Those that count themselves (``offset``) run themselves and are never replaced by a proxy:
        slime and miles also read ``rollout_data`` and ``micro_batch_indices`` from the object they passed.
        """
        for source in self._sources.values():
            source.start()
        self.begin_pass()
        with ExitStack() as undo:
            undo.callback(self._passes.close)
            for source in self._sources.values():
                undo.callback(source.begin)
            yield
