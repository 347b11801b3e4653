"""Open the channels between neighbouring stages in both directions, before the real step needs them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall, chunks_of
from pp_free_warmup.errors import NotInitialized, UnsupportedSetup


@dataclass(frozen=True)
class ChannelReport:
    """What opening the channels did on this rank.

    Attributes:
        seconds: Seconds per channel, in the order in which they were opened.
        opened: Those among them that were not open before, as far as this library opened them.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    opened: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Seconds of all channels together."""
        return sum(self.seconds.values())


_opened: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def prime(call: ScheduleCall, *, everything: bool = False) -> ChannelReport:
    """Open the channels that *call* will use: forwards along the pipeline, then backwards.

    A first transfer sets a connection up, per neighbour and per direction, and an all-reduce does not
    do it in its place. All ranks of the pipeline must come here together. Both directions never go in
    one batch: with two stages, both neighbours are the same rank, and a batch would pair the wrong
    two transfers.

    Args:
        call: The call; its own communicator and groups are used if it brings some.
        everything: Also the groups that reduce gradients, norms and embeddings after the schedule.

    Returns:
        How long each took and what was new.
    """
    chunks = call.chunks
    reductions = megatron.reduction_groups(call.keywords, call.config, chunks) if everything else ()
    return _run(_pipeline(call.groups, call.config, call.interleaved), reductions)


def prime_channels(
    model: torch.nn.Module | Iterable[torch.nn.Module],
    *,
    channels: str = "pipeline",
    pg_collection: Any = None,
    p2p_communicator: Any = None,
) -> ChannelReport:
    """Open the pipeline's channels now, for instance after its process groups were rebuilt.

    A block of `pipeline_warmup` around the loop does this by itself at the next call of the schedule.
    Every rank of the pipeline must call it, at the same point; it waits for the neighbours.

    Args:
        model: A model chunk or a list of chunks, wrapped or not; its config says how stages send.
        channels: ``"pipeline"``, or ``"all"`` for the groups that reduce after the schedule as well.
        pg_collection: The groups that the schedule will be given, if it will be given some.
        p2p_communicator: The communicator that the schedule will be given, likewise.

    Returns:
        How long each channel took and which were new.

    Raises:
        UnsupportedSetup: *model* is no model, or *channels* is neither of the two.
        NotInitialized: There are no process groups.

    Example:
        ::

            rebuild_process_groups()
            prime_channels(model)
    """
    chunks = chunks_of(model)
    _refuse(channels, p2p_communicator)
    config = megatron.config_of(chunks[0])
    given = {"pg_collection": pg_collection, "p2p_communicator": p2p_communicator}
    keywords = {name: value for name, value in given.items() if value is not None}
    interleaved = len(chunks) > 1 or config.virtual_pipeline_model_parallel_size is not None
    reductions = megatron.reduction_groups(keywords, config, chunks) if channels == "all" else ()
    return _run(_pipeline(megatron.groups_of(keywords), config, interleaved), reductions)


def _refuse(channels: str, communicator: Any) -> None:
    if channels not in ("pipeline", "all"):
        raise UnsupportedSetup(
            "prime_channels() does not know these channels.",
            found=f"channels={channels!r}; expected 'pipeline' or 'all'.",
            matters="Which groups are opened depends on it.",
            do="Leave it out for the pipeline's own channels.",
        )
    if communicator is None and not (torch.distributed.is_initialized() and megatron.is_initialized()):
        raise NotInitialized(
            "There are no channels to open yet.",
            found="no model-parallel process groups; expected Megatron's initialize_model_parallel() before.",
            matters="Channels belong to process groups, and are lost with them.",
            do="Call prime_channels() after the groups were built.",
        )


Channel = tuple[str, Any, Callable[[], object]]


def _pipeline(groups: megatron.Groups, config: Any, wraps: bool) -> Iterator[Channel]:
    if groups.pipeline.size() == 1:
        return
    communicator, shape = megatron.communicator_of(groups, config), megatron.probe_shape(config, groups)
    for name, forward in (("forward", True), ("backward", False)):
        yield name, groups.pipeline, partial(megatron.exchange, communicator, shape, forward=forward, wraps=wraps)


def _run(pipeline: Iterable[Channel], reductions: Iterable[tuple[str, Any]]) -> ChannelReport:
    seconds: dict[str, float] = {}
    opened: list[str] = []
    for name, group, open_channel in (*pipeline, *_reductions(reductions)):
        began = time.perf_counter()
        open_channel()
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - began
        known = _opened.setdefault(megatron.inner_group(group), set())
        if name not in known:
            known.add(name)
            opened.append(name)
    return ChannelReport(seconds, tuple(opened))


def _reductions(groups: Iterable[tuple[str, Any]]) -> Iterator[Channel]:
    """Yield one reduction per group; a group that goes by two names is opened once."""
    seen: set[int] = set()
    for name, group in groups:
        if id(group) not in seen:
            seen.add(id(group))
            yield name, group, partial(_reduce, group)


def _reduce(group: Any) -> None:
    number = torch.zeros(1, device=torch.cuda.current_device())
    torch.distributed.all_reduce(number, group=group)
