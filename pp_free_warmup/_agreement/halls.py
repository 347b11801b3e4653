"""Where the ranks of one process group put what they say."""

from __future__ import annotations

import weakref
import zlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pp_free_warmup._agreement.mailbox import Mailbox

PREFIX = "pp_free_warmup"


def inner(group: Any) -> Any:
    """Return the process group behind a wrapper that can rebuild it (miles' ReloadableProcessGroup)."""
    within = None if type(group) is dist.ProcessGroup else getattr(group, "group", None)
    return within if isinstance(within, dist.ProcessGroup) else group


def timeout_of(group: Any) -> float:
    """Return the timeout of *group*'s own communication, in seconds; the device's comes before the CPU's."""
    devices = sorted(group._device_types, key=lambda device: bool(device.type == "cpu"))
    timeout: timedelta = group._get_backend(devices[0]).options._timeout
    return timeout.total_seconds()


class Hall:
    """The places of one process group in the store, a new one for every vote.

    No place is ever used twice: votes are counted per group object, and group objects of one name
    are counted in the store (torch names them alike again once the world was destroyed and rebuilt,
    and under torchrun the store is still the same one).

    Args:
        group: The process group itself, see `inner`.
        mailbox: The store.
        rank: This process's global rank.

    Attributes:
        ranks: The global ranks of the group, in its order.
        leads: True on the rank that speaks for the group elsewhere.
    """

    _votes: weakref.WeakKeyDictionary[Any, tuple[str, int]] = weakref.WeakKeyDictionary()

    def __init__(self, group: Any, mailbox: Mailbox, rank: int) -> None:
        self._group = group
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        self.leads = self.ranks[0] == rank
        if group not in self._votes:
            digest = zlib.crc32(repr(self.ranks).encode())
            name = f"{PREFIX}/group {group.group_name}/{digest:08x}"
            self._votes[group] = (f"{name}/{mailbox.count(f'{name}/met by {rank}')}", 0)

    def place(self, later: int = 0) -> str:
        """Return what the keys of the current vote begin with, or of one some votes *later*."""
        name, votes = self._votes[self._group]
        return f"{name}/{votes + later}"

    def rise(self) -> None:
        """Go on to the next vote."""
        name, votes = self._votes[self._group]
        self._votes[self._group] = (name, votes + 1)
