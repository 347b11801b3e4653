"""Measure what a warmup costs beside its pass: `python tests/benchmarks/overhead.py [STAGES]`.

Four stages unless told otherwise, each of at least a thousand modules: saving, voting and putting back,
without the local pass, the channels, and the wait for a stage that is still busy.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist
from pipelines import SMALL

from pp_free_warmup import pipeline_warmup
from pp_free_warmup._agreement import Ballot
from pp_free_warmup._ledger import ledger
from pp_free_warmup._undo import swapped
from pp_free_warmup.testing import models, run_on_ranks

LAYERS_PER_STAGE, ROUNDS, ALLOWED_MS = 68, 7, 50.0


def parts(stages: int) -> tuple[int, int, list[dict[str, float]]]:
    """Warm often; return how many modules and parameters this stage has, and the seconds of each warmup."""
    training = models.build(replace(SMALL, pp=stages, layers=stages * LAYERS_PER_STAGE))
    rounds, votes = [], [0.0]
    vote = Ballot.vote

    def timed(*arguments: Any, **keywords: Any) -> Any:
        dist.barrier()  # what a vote costs, not how long the slowest stage works
        began = time.perf_counter()
        try:
            return vote(*arguments, **keywords)
        finally:
            votes[0] += time.perf_counter() - began

    with swapped(Ballot, "vote", timed):
        for _ in range(ROUNDS):
            ledger._pages.clear()  # the model counts as new
            votes[0] = 0.0
            with pipeline_warmup(training.chunks, training.optimizer) as warmup:
                training.step()
            seconds = warmup.report.seconds
            rounds.append({"save": seconds["save"], "votes": votes[0], "restore": seconds["restore"]})
    chunk = training.chunks[0]
    return len(list(chunk.modules())), len(list(chunk.parameters())), rounds


def main(count: int = 4) -> float:
    """Print the parts' medians over rounds, each the slowest stage's, and return their sum in milliseconds."""
    stages = run_on_ranks(parts, count, count, timeout=500)
    modules, parameters, _ = min(stages, key=lambda stage: stage[0])
    print(f"{count} stages, {modules} modules and {parameters} parameters per stage, medians of {ROUNDS} warmups")
    total = 0.0
    for part in ("save", "votes", "restore"):
        slowest = 1000 * max(statistics.median(each[part] for each in rounds) for _, _, rounds in stages)
        print(f"{part:8} {slowest:6.1f} ms")
        total += slowest
    print(f"together {total:6.1f} ms (allowed {ALLOWED_MS:.0f})")
    return total


if __name__ == "__main__":
    from overhead import main as measured  # the ranks import it by this name

    raise SystemExit(measured(*map(int, sys.argv[1:])) > ALLOWED_MS)
