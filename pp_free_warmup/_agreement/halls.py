"""Where the ranks of one process group put what they say."""

from __future__ import annotations

import weakref
import zlib
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist

from pp_free_warmup._agreement.mailbox import Mailbox

PREFIX = "pp_free_warmup"


def timeout_of(group: Any) -> float:
    """Return the timeout of *group*'s own communication, in seconds; the device's comes before the CPU's."""
    devices = sorted(group._device_types, key=lambda device: bool(device.type == "cpu"))
    timeout: timedelta = group._get_backend(devices[0]).options._timeout
    return timeout.total_seconds()


class Place(NamedTuple):
    """Where one vote of one group happens in the store.

    Attributes:
        name: The group's own, never that of another group object.
        number: Which of the group's votes.
    """

    name: str
    number: int

    def key(self, what: str) -> str:
        """Return one key of this place: ``words``, ``box`` or ``decision``."""
        return f"{self.name}/{self.number}/{what}"

    @property
    def mark(self) -> int:
        """A short number for this place, to tell it from others."""
        return zlib.crc32(self.key("").encode())

    def later(self, votes: int) -> Place:
        """Return the place of the vote that comes some *votes* later."""
        return Place(self.name, self.number + votes)


class Hall:
    """What one process group is to a vote: its ranks, and a place in the store for every vote.

    No place is ever used twice: votes are counted per group object, and group objects of one name
    are counted in the store (torch names them alike again once the world was destroyed and rebuilt,
    and under torchrun the store is still the same one).

    Args:
        group: The process group itself, not a wrapper of it.
        mailbox: The store.
        rank: This process's global rank.

    Attributes:
        ranks: The global ranks of the group, in its order.
        leads: True on the rank that speaks for the group elsewhere.
    """

    _places: ClassVar[weakref.WeakKeyDictionary[Any, Place]] = weakref.WeakKeyDictionary()

    def __init__(self, group: Any, mailbox: Mailbox, rank: int) -> None:
        self._group = group
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        self.leads = self.ranks[0] == rank
        if group not in self._places:
            name = f"{PREFIX}/group {group.group_name}/{zlib.crc32(repr(self.ranks).encode()):08x}"
            self._places[group] = Place(f"{name}/{mailbox.count(f'{name}/met by {rank}')}", 0)

    @property
    def place(self) -> Place:
        """The place of the current vote."""
        return self._places[self._group]

    def absence_of(self, rank: int) -> str:
        """Return the key under which *rank*, a member of the group, says that it has no voice in it."""
        return f"{self.place.name}/no voice {rank}"

    def note_of(self, rank: int) -> str:
        """Return the key under which *rank*, a member of the group, leaves a note for the others."""
        return f"{self.place.name}/note of {rank}"

    def rise(self) -> None:
        """Go on to the next vote."""
        self._places[self._group] = self.place.later(1)
