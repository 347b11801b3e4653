"""With a timeout shorter than the compile time of all stages together the bare run dies and the warmed one lives."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist
from forked import groups_that_wait, run_forked
from pipelines import Witness

from pp_free_warmup import pipeline_warmup
from pp_free_warmup.testing import models
from pp_free_warmup.testing.models import Layout

STAGES = 4
COMPILE = 2.0
TIMEOUT = 5.0  # less than three stages' forward compiles, for which the last stage waits; more than one's
SMALL = Layout(pp=STAGES, layers=STAGES, hidden=16, heads=2, seq=8, vocab=32, micro_batch=1, num_microbatches=4)


def first_step(warmed: bool) -> tuple[str, float]:
    """Take a first step whose first forward and backward on each stage sleep as a compiler works."""
    with groups_that_wait(TIMEOUT):
        training = models.build(SMALL)
    compiled = Witness()  # a compiler's cache is no state of the training

    def compile_once(what: str) -> None:
        if what not in compiled.notes:
            compiled.append(what)
            time.sleep(COMPILE)

    def forward_step(iterator: Any, chunk: Any) -> Any:
        output, loss = models.forward_step(iterator, chunk)
        compile_once("forward")
        if output.requires_grad:
            output.register_hook(lambda _gradient: compile_once("backward"))
        return output, loss

    training.forward_step = forward_step
    dist.barrier()
    began = time.monotonic()
    with pipeline_warmup(training.chunks, enabled=warmed) as warmup:
        step = training.step()
    assert step.updated
    return warmup.report.outcome, time.monotonic() - began


@pytest.mark.ranks
def test_a_short_timeout_ends_the_bare_run_and_not_the_warmed_one():
    """Four stages that compile for 2 s each die under a timeout of 5 s, and pass it warmed."""
    bare = run_forked(first_step, STAGES, False)
    warmed = run_forked(first_step, STAGES, True)

    assert "Timed out" in bare[-1].text or "timeout" in bare[-1].text.lower(), bare[-1]
    assert {ending.kind for ending in bare} == {"raised"}
    assert [(ending.kind, ending.text) for ending in warmed] == [("returned", "")] * STAGES
    assert {ending.value[0] for ending in warmed} == {"warmed"}
