"""Which runs the bench makes, in which order, and in which processes: new ones each, started ahead of their turn."""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pp_free_warmup._cli._bench_cases import Case
from pp_free_warmup._cli._bench_worker import measure
from pp_free_warmup.testing._rank_pool import RankPool, RanksFailed, run_on_ranks
from pp_free_warmup.testing._shared_gpu import rank_environment

# What is set for every rank. One compile thread each: with Inductor's own pool, kernels are compiled where no
# one counts them. Transformer Engine repeats its own results to the bit only without those algorithms.
ENVIRONMENT = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT",
    "NCCL_DEBUG_FILE": "{folder}/nccl.%h.%p",
}
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
COLD, WARM = "cold", "warm"
ERROR_KEPT = 20_000


@dataclass(frozen=True)
class Turn:
    """One run.

    Attributes:
        case: What is trained.
        caches: ``"cold"``: empty folders; ``"warm"``: those that the first such run has filled.
        warmed: Whether it warms up.
        number: Counts the runs of the same kind, from 1.
        probe: What looks closer, see `_bench_probes`.
    """

    case: Case
    caches: str
    warmed: bool
    number: int
    probe: str = ""

    @property
    def folder(self) -> str:
        """Where its compile caches lie; no spaces, which Inductor's call of g++ does not survive."""
        number = self.number if self.caches == COLD else 1
        return f"{self.case.name}/{'with' if self.warmed else 'without'}{self.probe}-{number}"

    def title(self) -> str:
        """Name it in one line."""
        probe = f", {self.probe}" if self.probe else ""
        return f"{self.case.name}, {self.caches} caches, {'with' if self.warmed else 'without'} #{self.number}{probe}"


def turns(cases: Sequence[Case], repeat: int, warm_caches: bool = True) -> list[Turn]:
    """Order the runs so that the most is known whenever time runs out.

    First without, with and without again for each case, then warm caches once, then repetitions; with
    and without alternate within a case throughout.
    """
    cold = [_round(cases, COLD, number) for number in range(1, repeat + 1)]
    warm = [_round(cases, WARM, number) for number in range(1, repeat + 1)] if warm_caches else [[]]
    return [turn for part in (cold[0], warm[0], *cold[1:], *warm[1:]) for turn in part]


def _round(cases: Sequence[Case], caches: str, number: int) -> list[Turn]:
    """Return one repetition of every case: A-B-A cold the first time, which is the second's A as well."""
    found = []
    for case in cases:
        without, again = Turn(case, caches, False, number), Turn(case, caches, False, number + 1)
        with_ = Turn(case, caches, True, number)
        if caches == WARM or number > 2:
            found += [without, with_]
        else:
            found += [without, with_, again] if number == 1 else [with_]
    return found


def probes(cases: Sequence[Case], names: Sequence[str]) -> list[Turn]:
    """Return one warmed run per case and probe."""
    return [Turn(case, COLD, True, 1, name) for case in cases for name in names]


@dataclass(frozen=True)
class Conditions:
    """What all runs of one bench share.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        ranks: Processes of each run.
        shared: Whether the ranks share one compile cache.
        compiled: On a CPU: whether Megatron's fused functions are compiled.
        steady: Steps after the first.
        limit_s: Seconds after which a run counts as hung.
        ahead: How many sets of processes are started ahead of their turn.
        root: Holds the compile caches.
    """

    device: str
    ranks: int
    shared: bool
    compiled: bool
    steady: int
    limit_s: float
    ahead: int
    root: Path

    def environment(self, turn: Turn) -> dict[str, str]:
        """Return what the ranks of *turn* find in their environment."""
        needed = rank_environment(self.device, self.ranks)
        folder = f"{self.root}/{turn.folder}/{'all' if self.shared else 'rank{rank}'}"
        return {**needed, **ENVIRONMENT, **{name: f"{folder}/{cache}" for name, cache in CACHES.items()}}


def run_all(waiting: Sequence[Turn], conditions: Conditions, deadline: float) -> Iterator[dict[str, Any]]:
    """Make the runs one after the other, none after *deadline* (by ``time.monotonic``).

    While one runs, the processes of the next ones import torch, Megatron and Transformer Engine.

    Yields:
        Of each run: what it was, ``wall_s``, and ``ranks`` (what `measure` returned) or ``error``.
    """
    pools: dict[int, RankPool] = {}
    try:
        for index, turn in enumerate(waiting):
            if time.monotonic() > deadline:
                yield {**_what(turn), "error": "no time left", "wall_s": 0.0}
                continue
            for soon in range(index, min(index + 1 + conditions.ahead, len(waiting))):
                if soon not in pools:
                    pools[soon] = RankPool(conditions.environment(waiting[soon]))
                    pools[soon].start(conditions.ranks)
            yield _run(turn, conditions, pools.pop(index))
    finally:
        for pool in pools.values():
            _end(pool)


def _run(turn: Turn, conditions: Conditions, pool: RankPool) -> dict[str, Any]:
    began = time.monotonic()
    result = _what(turn)
    try:
        result["ranks"] = run_on_ranks(
            measure,
            conditions.ranks,
            turn.case,
            timeout=conditions.limit_s,
            device=conditions.device,
            jit=conditions.compiled,
            pool=pool,
            warmed=turn.warmed,
            steady=conditions.steady,
            probe=turn.probe,
        )
    except RanksFailed as failure:
        result["error"] = str(failure)[:ERROR_KEPT]
    finally:
        _end(pool)
    return {**result, "wall_s": round(time.monotonic() - began, 2)}


def _end(pool: RankPool) -> None:
    pool.stop()
    atexit.unregister(pool.stop)


def _what(turn: Turn) -> dict[str, Any]:
    probe = {"probe": turn.probe} if turn.probe else {}
    return {"case": turn.case.name, "caches": turn.caches, "warmed": turn.warmed, "number": turn.number, **probe}
