"""Fetch each batch once, for the pass; serve the same batch again to the real schedule.

The pass gets a copy, since forward steps edit batches in place; the real
schedule gets the pristine item. Items are fetched only when a forward step asks,
and under the caller's random state, so that a shuffling loader draws what it
would have drawn without a warmup.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._copies import copy_of_batch
from pp_free_warmup._random import CallerRandom


class Recorder:
    """What the pass reads from in place of the caller's iterator."""

    def __init__(self, iterator: Iterator[Any], random: CallerRandom) -> None:
        self._iterator = iterator
        self._random = random
        self.fetched: deque[Any] = deque()
        self._served = 0
        self.error: BaseException | None = None
        self.exhausted = False
        self.draws = False

    def __iter__(self) -> Recorder:
        return self

    def again(self) -> None:
        """Begin with the first batch again, for another pass."""
        self._served = 0

    def __next__(self) -> Any:
        if self._served == len(self.fetched):
            self._fetch()
        self._served += 1
        return copy_of_batch(self.fetched[self._served - 1])

    def _fetch(self) -> None:
        if self.error is not None:
            raise self.error
        before = self._random.draws
        with self._random.as_caller():
            try:
                item = next(self._iterator)
            except BaseException as error:
                self.exhausted, self.error = isinstance(error, StopIteration), error
                raise
        self.draws |= self._random.draws > before
        self.fetched.append(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class Replay:
    """The caller's iterator with what the pass fetched put back in front of it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._iterator = recorder._iterator

    def __iter__(self) -> Replay:
        return self

    def __next__(self) -> Any:
        if self._recorder.fetched:
            return self._recorder.fetched.popleft()
        if self._recorder.error is not None:  # what it said in the pass; asked again, a generator would just end
            error, self._recorder.error = self._recorder.error, None
            raise error
        return next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


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
        self._recorders: dict[int, Recorder] = {
            id(iterator): Recorder(iterator, call.random)
            for iterator in call.iterators
            if iterator is not None and not counts_itself(iterator)
        }

    def for_pass(self, chunk: int) -> Any:
        """Return what the pass of this chunk reads from."""
        original = self._originals[chunk]
        return self._recorders.get(id(original), original)

    def again(self) -> None:
        """Serve the next pass what the last one was served."""
        for recorder in self._recorders.values():
            recorder.again()

    @property
    def exhausted(self) -> bool:
        """True when the pass asked an iterator for a batch that was not there."""
        return any(recorder.exhausted for recorder in self._recorders.values())

    @property
    def fetched(self) -> int:
        """Count the batches that the pass took from the caller's iterators and nobody got back yet."""
        return sum(len(recorder.fetched) for recorder in self._recorders.values())

    @property
    def drawing(self) -> int:
        """Count the caller's iterators that drew random numbers for what the pass took from them."""
        return sum(recorder.draws for recorder in self._recorders.values())

    def for_schedule(self) -> Any:
        """Return ``data_iterator`` for the real call: the very objects passed where nothing was fetched."""
        served: dict[int, Any] = {
            key: Replay(r) for key, r in self._recorders.items() if r.fetched or r.error is not None
        }
        if not served:
            return self._passed
        if isinstance(self._passed, (list, tuple)) and len(self._passed) == len(self._originals):
            return type(self._passed)(served.get(id(iterator), iterator) for iterator in self._passed)
        return served.get(id(self._passed), self._passed)

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Put the fields of iterators that count themselves (``offset``) back after the block.

        They run themselves and are never replaced by a proxy: slime and miles also read
        ``rollout_data`` and ``micro_batch_indices`` from the object they passed.
        """
        with ExitStack() as kept:
            for iterator in {id(i): i for i in self._originals if counts_itself(i)}.values():
                kept.callback(_put_back, iterator, dict(vars(iterator)))
            yield


def _put_back(iterator: Any, fields: dict[str, Any]) -> None:
    vars(iterator).clear()
    vars(iterator).update(fields)
