"""A pool of rank processes that lives as long as the test process, and no longer."""

from __future__ import annotations

import atexit
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from pp_free_warmup.testing._rank_job import Job, Outcome, Where
from pp_free_warmup.testing._rank_process import Worker
from pp_free_warmup.testing._shared_gpu import rank_environment

# Seconds for a new process to import torch and Megatron, also on a busy machine.
START = 180.0

# Once one rank has failed, the others may fail as well, and say more; longer is not worth waiting.
GRACE = 3.0


class RanksFailed(AssertionError):
    """Some rank raised, died or hung; the text has each one's traceback or stacks."""


class RanksSkipped(Exception):
    """Every rank skipped the test."""


class RankPool:
    """Worker processes that are kept between tests, as many as the largest test needed.

    Args:
        environment: Environment variables of the workers; ``{folder}`` in a value stands for
            a directory of the worker's own, ``{rank}`` for its rank.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.environment = dict(environment or {})
        self.workers: list[Worker] = []
        self._starting: list[Worker] = []
        atexit.register(self.stop)

    def start(self, n: int) -> None:
        """Start workers until there are *n*, and do not wait for them: `run` does."""
        for rank in range(len(self.workers), n):
            own = {name: value.replace("{rank}", str(rank)) for name, value in self.environment.items()}
            self.workers.append(Worker.start(own))
            self._starting.append(self.workers[-1])

    def run(self, jobs: Sequence[Job]) -> list[Any]:
        """Run one job per rank and return what each returned, in rank order.

        Raises:
            RanksFailed: A rank raised, died or hung. The workers are then replaced.
            RanksSkipped: Every rank called ``pytest.skip``.
        """
        self.start(len(jobs))
        started, self._starting = self._starting, []
        workers = self.workers[: len(jobs)]
        try:
            _values(started, _collect(started, time.monotonic() + START), START)
            for worker, job in zip(workers, jobs, strict=True):
                worker.send(job)
            ended = _collect(workers, time.monotonic() + jobs[0].timeout)
            return _values(workers, ended, jobs[0].timeout)
        except BaseException as error:
            if not isinstance(error, RanksSkipped):
                self.stop()
            raise

    def stop(self) -> None:
        """Kill every worker."""
        self._starting.clear()
        while self.workers:
            self.workers.pop().stop()


def _collect(workers: list[Worker], deadline: float) -> dict[int, Outcome]:
    """Receive the ranks' outcomes; soon after one failed, give up on those still running."""
    ended: dict[int, Outcome] = {}
    rank_of = {worker.connection: rank for rank, worker in enumerate(workers)}
    while rank_of:
        ready = wait(list(rank_of), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return ended
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = rank_of.pop(connection)
            ended[rank] = workers[rank].outcome()
            if ended[rank].kind != "returned":
                deadline = min(deadline, time.monotonic() + GRACE)
    return ended


def _values(workers: list[Worker], ended: dict[int, Outcome], timeout: float) -> list[Any]:
    """Return the returned values, or raise with what every rank has to say."""
    kinds = {outcome.kind for outcome in ended.values()}
    if kinds <= {"returned"} and len(ended) == len(workers):
        return [ended[rank].value for rank in range(len(workers))]
    if kinds == {"skipped"} and len(ended) == len(workers):
        raise RanksSkipped(ended[0].text)
    failed = any(outcome.kind == "raised" for outcome in ended.values())
    late = (
        f"still running {GRACE:.0f} s after another rank failed" if failed else f"still running after {timeout:.0f} s"
    )
    parts = []
    for rank, worker in enumerate(workers):
        outcome = ended.get(rank)
        if outcome is None:
            parts.append(f"Rank {rank}: {late}. Its stacks:\n{worker.stacks()}")
        elif outcome.kind != "returned":
            parts.append(f"Rank {rank}: {outcome.kind}\n{outcome.text}\nPrinted:\n{worker.printed[-4000:]}")
    raise RanksFailed("\n\n".join(parts))


_numbers = itertools.count()
_stores: list[dist.TCPStore] = []
_pools: dict[tuple[tuple[str, str], ...], RankPool] = {}


def _store() -> tuple[str, int]:
    """Host the one TCP store that all jobs meet in, as a launcher's agent does."""
    if not _stores:
        _stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return "127.0.0.1", _stores[0].port


def run_on_ranks(
    function: Callable[..., Any],
    n: int,
    *arguments: Any,
    fresh: bool = False,
    timeout: float = 120.0,
    device: str = "cpu",
    jit: bool = False,
    environment: Mapping[str, str] | None = None,
    pool: RankPool | None = None,
    **keywords: Any,
) -> list[Any]:
    """Call *function* on *n* processes that form one ``torch.distributed`` world.

    Args:
        function: A function that can be imported by its module and name.
        n: How many ranks.
        *arguments: What to call it with on every rank; must be picklable.
        fresh: Use new processes with empty compile caches, one per rank, and end them afterwards.
        timeout: Seconds after which the ranks count as hung.
        device: ``"cpu"`` for gloo inside `cuda_on_cpu`, ``"cuda"`` for NCCL; ranks beyond the GPUs share them.
        jit: Compile Megatron's fused functions for real, see `cuda_on_cpu`.
        environment: Variables of fresh processes, which win; ``{folder}`` is a directory of the process's own.
        pool: Processes of the caller's, who stops them; None takes the ones that all tests share.
        **keywords: More arguments for *function*.

    Returns:
        What *function* returned on each rank, in rank order.

    Raises:
        RanksFailed: A rank raised, died or hung. The text names it and shows where.
        RanksSkipped: Every rank called ``pytest.skip``.
        RuntimeError: This machine has no GPU, or none that the ranks can share.
    """
    where, prefix, host = Where.of(function), f"job{next(_numbers)}", _store()
    jobs = [Job(where, arguments, keywords, rank, n, host, prefix, timeout, device, jit) for rank in range(n)]
    if pool is not None:
        return pool.run(jobs)
    needed = rank_environment(device, n)
    return _run_afresh(jobs, {**needed, **(environment or {})}) if fresh else _shared_pool(needed).run(jobs)


def _shared_pool(environment: Mapping[str, str]) -> RankPool:
    """Return the pool whose processes have this environment: NCCL reads it once, whatever runs there later."""
    key = tuple(environment.items())
    if key not in _pools:
        _pools[key] = RankPool(environment)
    return _pools[key]


def _run_afresh(jobs: list[Job], environment: Mapping[str, str]) -> list[Any]:
    caches = {"TORCHINDUCTOR_CACHE_DIR": "{folder}/inductor", "TRITON_CACHE_DIR": "{folder}/triton"}
    pool = RankPool({**caches, **environment})
    try:
        return pool.run(jobs)
    finally:
        pool.stop()
        atexit.unregister(pool.stop)
