"""Keep the state of a framework of one's own: a replay manager, an environment variable, a progress bar."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from rich.progress import Progress

from pp_free_warmup import pipeline_warmup
from pp_free_warmup.testing import cuda_on_cpu, models

RANKS = 2


class Replay:
    """What an RL framework replays: one entry per microbatch, read by a cursor."""

    def __init__(self) -> None:
        self.cursor = 0
        self.entries: list[str] = []

    def next(self) -> str:
        """Move on by one microbatch."""
        self.entries.append(f"routing of microbatch {self.cursor}")
        self.cursor += 1
        return self.entries[-1]


replay = Replay()
progress = Progress(disable=True)
bar = progress.add_task("microbatches")


def forward_step(iterator: Any, chunk: Any) -> Any:
    """Run a microbatch, and change all three."""
    os.environ["ROUTING_STAGE"] = replay.next()
    progress.advance(bar)
    return models.forward_step(iterator, chunk)


@contextmanager
def replay_cursor(_call: Any) -> Iterator[None]:
    """Keep the replay where it is: the cursor goes back, and what the pass appended is cut off."""
    cursor, length = replay.cursor, len(replay.entries)
    try:
        yield
    finally:
        replay.cursor = cursor
        del replay.entries[length:]


@contextmanager
def routing_stage(_call: Any) -> Iterator[None]:
    """Keep an environment variable; one that was absent is absent again."""
    before = os.environ.get("ROUTING_STAGE")
    try:
        yield
    finally:
        os.environ.pop("ROUTING_STAGE", None)
        if before is not None:
            os.environ["ROUTING_STAGE"] = before


@contextmanager
def progress_bar(_call: Any) -> Iterator[None]:
    """Keep the bar's count."""
    count = progress.tasks[bar].completed
    try:
        yield
    finally:
        progress.update(bar, completed=count)


def train(rank: int, meeting_point: str) -> None:
    """Take one step on this rank, warmed, with the three guards."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=RANKS)
    guards = [replay_cursor, routing_stage, progress_bar]
    with cuda_on_cpu():
        training = models.build(models.Layout(pp=RANKS, layers=2), step=forward_step)
        with pipeline_warmup(training.chunks, training.optimizer, extra_guards=guards, verify=True):
            get_forward_backward_func()(**training.schedule_arguments())
    expected = training.layout.num_microbatches
    seen = (replay.cursor, len(replay.entries), progress.tasks[bar].completed)
    assert seen == (expected,) * 3, f"the warmup was counted: {seen}"
    if rank == 0:
        print(f"counted {expected} microbatches in all three: the warmup's is not among them", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, args=(f"file://{Path(folder, 'meeting_point')}",), nprocs=RANKS)
