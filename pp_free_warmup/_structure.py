"""The one rule: fields and contents come back as the very objects that they were.

What is kept is which objects lie where, not what tensors hold. Absent is a state: a field,
an entry or a submodule that the block added is gone afterwards, and is made again when the
real step needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType
from typing import Any

import torch

from pp_free_warmup._kinds import is_number, slots_read
from pp_free_warmup._reach import Reached, Walk
from pp_free_warmup._undo import ABSENT, is_same_dict, refill

# What torch.compile notes of code that it compiled in the block and that stays: without the note it would be stale.
COMPILER = "_dynamo_"
# Only what holds plain data is made again with the next step; a thread pool, a process group or a stream stays.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, dict, list, set, tuple, deque)


class Kept:
    """What lay where when this was made.

    Args:
        reached: Where to look.
    """

    def __init__(self, reached: Reached) -> None:
        self._reached = reached
        self._fields = [fields.copy() for fields in reached.fields]
        self._contents: dict[int, Any] = {place: each.copy() for place, each in enumerate(reached.containers) if each}
        self._slots = [slots_read(value, slots) for value, slots in reached.slotted]
        self._cells = [_read(cell) for cell in reached.cells]
        self._names = [home.get(name, ABSENT) for home, name in reached.names]
        self._classes = [type(module) for module in reached.modules]

    def put_back(self) -> None:
        """Write what differs; objects that lie where they lay are not touched."""
        self._put_back_contents()
        reached = self._reached
        for module, of in zip(reached.modules, self._classes, strict=True):
            if type(module) is not of:
                module.__class__ = of
        for (value, slots), before in zip(reached.slotted, self._slots, strict=True):
            _put_back_slots(value, slots, before)
        for cell, content in zip(reached.cells, self._cells, strict=True):
            _write(cell, content)
        for (home, name), content in zip(reached.names, self._names, strict=True):
            home[name] = content

    def _put_back_contents(self) -> None:
        for fields, before in zip(self._reached.fields, self._fields, strict=True):
            if not is_same_dict(fields, before):
                _put_back_fields(fields, before, lasting=id(fields) in self._reached.lasting)
        containers = self._reached.containers
        filled = (place for place, container in enumerate(containers) if container)
        for place in {**self._contents, **dict.fromkeys(filled)}:
            refill(containers[place], self._contents.get(place, _empty(containers[place])))

    def advance(self, now: Kept, after: Kept) -> None:
        """Change again what changed from here to *after*, where it is *now* as it was here."""
        here, by_now = self._places(), now._places()
        for key, (place, new) in after._places().items():
            old = here.get(key, (None, _empty(place)))[1]
            live = by_now.get(key, (None, old))[1]
            if isinstance(place, dict):
                refill(place, _advanced(live, old, new))
            elif _is_alike(live, old):
                refill(place, new)
        slots_here = {id(one): held for (one, _), held in zip(self._reached.slotted, self._slots, strict=True)}
        for (value, slots), new in zip(after._reached.slotted, after._slots, strict=True):
            live = slots_read(value, slots)
            _put_back_slots(value, slots, _advanced(live, slots_here.get(id(value), {}), new))

    def _places(self) -> dict[int, tuple[Any, Any]]:
        """Return every dict of fields and every container with what it held, by its id."""
        reached = self._reached
        fields = {id(place): (place, held) for place, held in zip(reached.fields, self._fields, strict=True)}
        containers = enumerate(reached.containers)
        return fields | {id(one): (one, self._contents.get(place, _empty(one))) for place, one in containers}

    @contextmanager
    def as_caller(self) -> Iterator[None]:
        """Let what the block changes stay: it would have happened without the warmup too, as a fetch does."""
        before = Kept(self._reached)
        try:
            yield
        finally:
            self._take_over(before)

    def _take_over(self, earlier: Kept) -> None:
        """Keep as it is now whatever is not as it was *earlier*."""
        now = Kept(self._reached)
        for mine, old, new in zip(self._fields, earlier._fields, now._fields, strict=True):
            _merge(mine, old, new)
        for place in {*earlier._contents, *now._contents}:
            self._take_over_contents(place, earlier._contents.get(place), now._contents.get(place))
        for variables, was, now_are in (
            (self._cells, earlier._cells, now._cells),
            (self._names, earlier._names, now._names),
        ):
            variables[:] = [
                kept if first is second else second for kept, first, second in zip(variables, was, now_are, strict=True)
            ]

    def _take_over_contents(self, place: int, old: Any, new: Any) -> None:
        container = self._reached.containers[place]
        old, new = (_empty(container) if each is None else each for each in (old, new))
        if isinstance(container, dict):
            mapping = self._contents.setdefault(place, {})
            _merge(mapping, old, new)
        elif list(map(id, old)) != list(map(id, new)):
            mine = list(self._contents.get(place, ()))
            appended = isinstance(container, list) and list(map(id, old)) == list(map(id, new[: len(old)]))
            self._contents[place] = mine + new[len(old) :] if appended else new


@contextmanager
def structure_kept(*roots: Any) -> Iterator[None]:
    """Keep the fields of objects and what their containers hold, down to what hangs on them.

    Args:
        *roots: Objects, containers or modules; what is neither is passed over.

    Example:
        >>> from types import SimpleNamespace
        >>> tracker = SimpleNamespace(seen=[1])
        >>> with structure_kept(tracker):
        ...     tracker.seen.append(2)
        ...     tracker.last = 2
        >>> tracker
        namespace(seen=[1])
    """
    kept = Kept(Walk().from_model(roots))
    try:
        yield
    finally:
        kept.put_back()


def _put_back_fields(fields: dict[str, Any], before: dict[str, Any], *, lasting: bool) -> None:
    added = [name for name in fields if name not in before]
    stays = {name: fields[name] for name in added if _stays(name, fields[name], lasting=lasting)}
    refill(fields, {**before, **stays} if stays else before)


def _stays(name: str, value: object, *, lasting: bool) -> bool:
    return name.startswith(COMPILER) or (lasting and not isinstance(value, PLAIN))


def _put_back_slots(value: object, slots: tuple[Any, ...], before: dict[Any, Any]) -> None:
    now = slots_read(value, slots)
    for slot in slots:
        if slot in before and now.get(slot, ABSENT) is not before[slot]:
            slot.__set__(value, before[slot])
        elif slot in now and slot not in before:
            slot.__delete__(value)


def _merge(mine: dict[Any, Any], old: dict[Any, Any], new: dict[Any, Any]) -> None:
    """Make in *mine* the changes that lead from *old* to *new*."""
    for key in {**old, **new}:
        if old.get(key, ABSENT) is not new.get(key, ABSENT):
            if key in new:
                mine[key] = new[key]
            else:
                mine.pop(key, None)


def _advanced(live: dict[Any, Any], old: dict[Any, Any], new: dict[Any, Any]) -> dict[Any, Any]:
    """Return *live* with the changes from *old* to *new*, but for what is not as it was in *old*."""
    unlike = {key for key in {**old, **new} if not _is_one(live.get(key, ABSENT), old.get(key, ABSENT))}
    made = dict(live)
    _merge(made, {k: v for k, v in old.items() if k not in unlike}, {k: v for k, v in new.items() if k not in unlike})
    return made


def _is_alike(one: Any, other: Any) -> bool:
    return len(one) == len(other) and (one == other if isinstance(one, set) else all(map(_is_one, one, other)))


def _is_one(one: Any, other: Any) -> bool:
    """Tell whether two values are one and the same: the same object, or equal numbers or texts."""
    return one is other or (type(one) is type(other) and is_number(one) and one == other)


def _empty(container: Any) -> Any:
    return {} if isinstance(container, dict) else ()


def _read(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not bound yet
        return ABSENT


def _write(cell: CellType, content: Any) -> None:
    if _read(cell) is content:
        return
    if content is ABSENT:
        del cell.cell_contents
    else:
        cell.cell_contents = content
