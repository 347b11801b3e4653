"""Measure what a schedule call costs once its model is warm: `python tests/benchmarks/warm_call.py`."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pp_free_warmup.testing import cuda_on_cpu

CALLS = 2000
ROUNDS = 9
ALLOWED_US = 10.0


def schedule(
    *,
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool = False,
) -> list[Any]:
    """Stand in for a schedule that takes no time."""
    return []


def microseconds(function: Callable[..., Any], keywords: dict[str, Any]) -> float:
    """Return the median over rounds of one call's time."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            function(**keywords)
        rounds.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(rounds)


def added_by(warmed: Callable[..., Any], keywords: dict[str, Any]) -> float:
    """Return the microseconds that the wrapper adds to a call."""
    return microseconds(warmed, keywords) - microseconds(schedule, keywords)


def main() -> float:
    """Measure both doors; print and return the larger cost in microseconds."""
    from megatron.core import parallel_state

    from pp_free_warmup import warm_first_call
    from pp_free_warmup._ledger import TRAINING, Page, ledger

    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{Path(folder, 'store')}", rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        model = torch.nn.Linear(1, 1)
        group = parallel_state.get_pipeline_model_parallel_group()
        ledger.write((model,), TRAINING, Page(warm=True))
        ledger.prime(group)
        keywords = {
            "forward_step_func": None,
            "data_iterator": None,
            "model": [model],
            "num_microbatches": 4,
            "seq_length": 8,
            "micro_batch_size": 1,
        }
        added = max(
            added_by(warm_first_call(schedule), keywords),
            added_by(warm_first_call(schedule, model=model), keywords),
        )
        torch.distributed.destroy_process_group()
    print(f"a warm schedule call costs {added:.1f} us more (allowed {ALLOWED_US:.0f})")
    return added


if __name__ == "__main__":
    with cuda_on_cpu():
        raise SystemExit(main() > ALLOWED_US)
