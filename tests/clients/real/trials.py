"""Run a trainer's own code on forked ranks, without the warmup and with it, and compare to the bit.

A trainer's file says how it lives (``live``) and what to import before the ranks are forked (``after``):
an import may take half a minute, a fork takes none.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from forked import Ending, run_forked

DEADLINE_S = 200.0


class Life(NamedTuple):
    """What one rank did and computed.

    Attributes:
        trace: What must not depend on the warmup: one line per value, its name first.
        warmups: Kind and outcome of each warmup, in order.
    """

    trace: list[str]
    warmups: list[tuple[str, str]]


class Trace:
    """The lines of a `Life`."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, name: str, value: Any) -> None:
        """Write *value* down exactly: tensors as digests, nested ones by their values, floats in hexadecimal."""
        self.lines.append(f"{name} = {_exact(value)}")

    def add_parameters(self, name: str, models: Iterable[Any]) -> None:
        """Write down every parameter of *models*."""
        for number, model in enumerate(models):
            for path, parameter in model.named_parameters():
                self.add(f"{name}[{number}].{path}", parameter)


def _exact(value: Any) -> Any:
    if hasattr(value, "is_nested"):  # a tensor: torch is not imported where tests are collected
        # A copy: a storage that numpy has seen can no longer be resized, as trainers that offload do.
        dense = (value.values() if value.is_nested else value).detach().cpu().contiguous().clone()
        digest = hashlib.sha1(dense.flatten().view(_bytes()).numpy().tobytes(), usedforsecurity=False)
        return f"{tuple(dense.shape)} {digest.hexdigest()[:12]}"
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [_exact(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _exact(value[key]) for key in sorted(value)}
    return value


def _bytes() -> Any:
    import torch

    return torch.uint8


@contextmanager
def started_by_torchrun() -> Iterator[None]:
    """Let a rank find the environment that torchrun gives it; the process group is there already."""
    import torch.distributed as dist

    there = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "LOCAL_RANK": 0, "MASTER_PORT": 1}
    with mock.patch.dict(os.environ, {**{name: str(value) for name, value in there.items()}, "MASTER_ADDR": "::1"}):
        yield


def lives(live: Callable[..., Life], *arguments: Any, after: Any, warmed: bool, ranks: int = 2) -> list[Life]:
    """Let *live* run on *ranks* processes; fail with all that they said if one does not come back."""
    endings = run_forked(live, ranks, warmed, *arguments, after=after, deadline=DEADLINE_S)
    assert all(ending.kind == "returned" for ending in endings), _told(endings)
    return [ending.value for ending in endings]


def assert_equal_lives(
    live: Callable[..., Life], *arguments: Any, after: Any, warmups: list[tuple[str, str]], ranks: int = 2
) -> None:
    """Live without and with the warmup; expect the same on every rank, and *warmups* in the second life.

    Args:
        live: Called with whether to warm up and with *arguments*.
        *arguments: The rest of its arguments, picklable.
        after: What to call before the ranks are forked.
        warmups: Kind and outcome of every warmup.
        ranks: How many processes.
    """
    cold = lives(live, *arguments, after=after, warmed=False, ranks=ranks)
    warm = lives(live, *arguments, after=after, warmed=True, ranks=ranks)

    for rank, (without, with_it) in enumerate(zip(cold, warm, strict=True)):
        assert without.warmups == []
        assert with_it.trace == without.trace, _differences(rank, without.trace, with_it.trace)
        assert with_it.warmups == warmups


def _differences(rank: int, cold: list[str], warm: list[str]) -> str:
    differing = [f"{a}\n    warmed: {b}" for a, b in zip(cold, warm, strict=False) if a != b]
    head = f"rank {rank}: {len(differing)} of {len(cold)} lines differ ({len(warm)} with the warmup)"
    return "\n".join([head, *differing[:12]])


def _told(endings: list[Ending]) -> str:
    printed = [f"printed by {rank}:\n{ending.printed[-2000:]}" for rank, ending in enumerate(endings)]
    ended = [f"rank {rank}: {ending.kind}\n{ending.text[-3000:]}" for rank, ending in enumerate(endings)]
    return "\n".join([*printed, *ended])
