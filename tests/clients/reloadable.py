"""Process groups that can be taken down and built again under the same objects, as RL frameworks have them.

slime and miles put Megatron to sleep while the rollout engine uses the GPUs: every communicator is
destroyed, and built anew on wake-up. Megatron keeps its group objects through that, so these are
wrappers, known to ``torch.distributed`` by functions that look inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

ASKED = ("get_rank", "get_world_size", "get_backend", "get_global_rank", "get_group_rank", "get_process_group_ranks")
CALLED = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_tensor",
    "barrier",
    "send",
    "recv",
    "isend",
    "irecv",
    "_coalescing_manager",
)
METHODS = ("allreduce", "allgather", "broadcast", "barrier", "send", "recv", "_get_backend", "name", "rank", "size")


class ReloadableGroup(dist.ProcessGroup):
    """A process group whose inside may be exchanged; the real one is ``group``, None while asleep."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: ReloadableGroup, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self.group, name)(*arguments, **keywords)

    return method


for _name in METHODS:
    setattr(ReloadableGroup, _name, _passed_on(_name))


def _inside(value: Any) -> Any:
    return value.group if isinstance(value, ReloadableGroup) else value


def _looking_inside(function: Callable[..., Any]) -> Callable[..., Any]:
    def looked(*arguments: Any, **keywords: Any) -> Any:
        return function(*map(_inside, arguments), **{name: _inside(value) for name, value in keywords.items()})

    return looked


class Reloading:
    """All groups that this process built or took part in building, in order."""

    def __init__(self) -> None:
        self.groups: list[ReloadableGroup] = []
        self._builds: list[tuple[ReloadableGroup | None, Callable[[], Any]]] = []
        self._new_group = dist.new_group
        self._store = distributed_c10d._get_default_store()
        self._generation = 0

    def new_group(self, *arguments: Any, **keywords: Any) -> Any:
        """Build a group as torch does, and wrap it where this rank is a member."""
        build = partial(self._new_group, *arguments, **keywords)
        group = build()
        outside = group is dist.GroupMember.NON_GROUP_MEMBER
        wrapper = None if outside else ReloadableGroup(group)
        self._builds.append((wrapper, build))
        if wrapper is None:
            return group
        self.groups.append(wrapper)
        return wrapper

    def sleep(self) -> None:
        """Destroy every real group; the wrappers stay."""
        for wrapper in self.groups:
            group, wrapper.group = wrapper.group, None
            dist.destroy_process_group(group)

    def sleep_with_the_world(self) -> None:
        """Destroy the world itself, and all groups with it; begin another on the same store, as slime does."""
        rank, size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
        dist.barrier()
        dist.destroy_process_group()
        for wrapper in self.groups:
            wrapper.group = None
        self._generation += 1
        store = dist.PrefixStore(f"world {self._generation}", self._store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)

    def wake_up(self) -> None:
        """Build every real group again, in the old order and on all ranks, inside the same wrappers."""
        for wrapper, build in self._builds:
            group = build()
            if wrapper is not None:
                wrapper.group = group


@contextmanager
def reloadable_groups() -> Iterator[Reloading]:
    """Let every group that is built in the block be reloadable."""
    reloading, operation = Reloading(), dist.P2POp
    with ExitStack() as stack:
        for name in (*ASKED, *CALLED):
            stack.enter_context(mock.patch.object(dist, name, _looking_inside(getattr(dist, name))))
        real = {"isend": distributed_c10d.isend, "irecv": distributed_c10d.irecv}

        def p2p_op(op: Any, tensor: Any, peer: Any = None, group: Any = None, *more: Any) -> Any:
            act = next((real[name] for name in real if op is getattr(dist, name)), op)
            return operation(act, tensor, peer, _inside(group), *more)

        stack.enter_context(mock.patch.object(dist, "P2POp", p2p_op))
        stack.enter_context(mock.patch.object(dist, "new_group", reloading.new_group))
        yield reloading
