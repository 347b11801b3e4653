"""What an iterator keeps about itself: read it, put it back, and make one fetch's change again.

The pass fetches a batch that the real schedule is served later. What the fetch wrote
into the iterator's own fields (a position, a log, a private generator) belongs to the
real step, at the moment when the batch is served; what else the pass wrote belongs to
nobody. What the iterator merely wraps (a generator, an inner loader) has advanced for good.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pp_free_warmup._callables import own_fields
from pp_free_warmup._generators import set_state, state_of
from pp_free_warmup._reach import Walk
from pp_free_warmup._structure import Kept

SMALL = 4096  # a tensor of no more elements, in a field of the iterator, may be a counter
DEPTH = 4  # how far below the iterator a thread or a queue is looked for
OPAQUE = (torch.nn.Module, torch.Tensor, type)
OTHERS = {"threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio", "socket", "subprocess"}


@contextmanager
def own_state_kept(iterator: Any) -> Iterator[None]:
    """Keep what an iterator that runs itself holds, down to its private generators."""
    before = Progress(iterator)
    try:
        yield
    finally:
        before.put_back()


def is_written_by_others(iterator: Any) -> bool:
    """Tell whether a thread or process may write to the iterator's fields at any time: those are left alone.

    A prefetcher's buffer that is put back would lose what its thread has filled in since.
    """
    level, seen = [iterator], {id(iterator)}
    for _ in range(DEPTH):
        if any(map(is_of_others, level)):
            return True
        inside = [part for value in level if not isinstance(value, OPAQUE) for part in own_fields(value).values()]
        level = [part for part in inside if id(part) not in seen]
        seen.update(map(id, level))
    return False


def is_of_others(value: Any) -> bool:
    """Tell whether this is a thread, a process, or what they talk through."""
    return any(base.__module__.partition(".")[0] in OTHERS for base in type(value).__mro__[:-1])


class Progress:
    """The fields of an iterator at one moment, what hangs on them, its generators and small tensors.

    Args:
        iterator: Any object. One without fields, such as a generator, has no progress that can be seen.
    """

    def __init__(self, iterator: Any) -> None:
        self._owner = iterator
        reached = Walk().from_object(iterator)
        self._kept = Kept(reached)
        self._states = {id(one): (one, state_of(one)) for one in reached.generators}
        tensors = [value for value in own_fields(iterator).values() if _is_small(value)]
        self._values = {id(one): (one, one.detach().clone()) for one in tensors}

    def put_back(self) -> None:
        """Make the iterator again what it was: the same objects, with the same contents."""
        self._kept.put_back()
        for generator, state in self._states.values():
            set_state(generator, state)
        for tensor, values in self._values.values():
            tensor.data.copy_(values)

    def advance_to(self, after: Progress) -> None:
        """Change the iterator again as it changed from here to *after*, where it is now as it was here.

        What differs from here by now was changed by somebody else, who knows better.
        """
        now = Progress(self._owner)
        self._kept.advance(now._kept, after._kept)
        for key, (generator, state) in after._states.items():
            if _is_where_it_was(self._states, now._states, key):
                set_state(generator, state)
        for key, (tensor, values) in after._values.items():
            if _is_where_it_was(self._values, now._values, key):
                tensor.data.copy_(values)


def _is_small(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and value.numel() <= SMALL


def _is_where_it_was(here: dict[int, Any], now: dict[int, Any], key: int) -> bool:
    """Tell whether a generator or tensor is as it was; one that was not there goes by what is to come."""
    if key not in here or key not in now:
        return True
    one, other = here[key][1], now[key][1]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return pickle.dumps(one) == pickle.dumps(other)
