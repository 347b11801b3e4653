"""A hundred warmups in one process leave it as the first few did: no memory, thread, hook or file is kept."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import SMALL, VIRTUAL

from pp_free_warmup import pipeline_warmup
from pp_free_warmup._ledger import ledger
from pp_free_warmup.testing import models, run_on_ranks
from pp_free_warmup.testing.models import Layout

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
WARMUPS = 100
SETTLED = 20


def _held(training: Any) -> dict[str, int]:
    """Count what this process holds, and what hangs on the model."""
    gc.collect()
    modules = [module for chunk in training.chunks for module in chunk.modules()]
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "hooks": sum(len(value) for module in modules for name, value in vars(module).items() if "_hooks" in name),
        "fields": sum(len(vars(module)) for module in modules),
        "tensors": sum(isinstance(each, torch.Tensor) for each in gc.get_objects()),
    }


def _kilobytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


def warm_often(layout: Layout) -> tuple[dict[str, int], dict[str, int], int]:
    """Warm one model again and again; return what was held early and at the end, and the memory it grew by."""
    training = models.build(layout)
    for number in range(WARMUPS):
        ledger._pages.clear()  # the model counts as new
        with pipeline_warmup(training.chunks, training.optimizer) as warmup:
            training.step()
        assert warmup.report.outcome == "warmed"
        if number == SETTLED:
            early, began = _held(training), _kilobytes()
    return early, _held(training), _kilobytes() - began


@pytest.mark.parametrize("layout", [SMALL, VIRTUAL], ids=["pp2", "pp2 vpp2"])
def test_a_hundred_warmups_keep_nothing(layout: Layout) -> None:
    """Threads, files, hooks, fields and tensors are as many as after the twentieth; memory grew by less than 8 MB."""
    for early, late, grown in run_on_ranks(warm_often, 2, layout, timeout=240):
        assert late == early
        assert grown < 8_000
