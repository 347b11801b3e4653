"""While one stage compiles, no other stage sits in a receive: they work, and then ask a store."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelines import Witness

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import in_warmup, pipeline_warmup
from pp_free_warmup.testing import models, ranks
from pp_free_warmup.testing.models import Layout

pytestmark = pytest.mark.ranks
SMALL = Layout(pp=4, layers=4, hidden=16, heads=2, seq=8, vocab=32, micro_batch=1, num_microbatches=4)
SLOW, COMPILE = 2, 3.0


def started() -> int:
    """Return how many operations this rank has started on the pipeline's group and on the world."""
    from megatron.core import parallel_state

    groups = (parallel_state.get_pipeline_model_parallel_group(), dist.group.WORLD)
    return sum(group._get_backend(torch.device("cpu"))._get_sequence_number_for_group() for group in groups)


@ranks(4)
def test_no_stage_waits_for_one_that_is_ten_times_slower() -> None:
    """The other stages end their pass at once, and nothing is sent between stages before the slow one is done."""
    rank, seen = dist.get_rank(), Witness()

    def forward_step(iterator: Any, chunk: Any) -> Any:
        if in_warmup():
            seen.append(started())
            if rank == SLOW:
                time.sleep(COMPILE)
        outputs = models.forward_step(iterator, chunk)
        if in_warmup():
            outputs[0].register_hook(lambda _gradient: seen.append(started()))
        return outputs

    training = models.build(SMALL, step=forward_step)
    with pipeline_warmup(training.chunks) as warmup:
        training.step()

    report = warmup.report
    assert len(seen) == 2
    assert seen.notes[0] == seen.notes[1]
    assert report.transfers_in_pass == 0
    slowest = [stage.most["pass"] for stage in report.stages]
    assert slowest[SLOW] >= COMPILE
    assert all(seconds < COMPILE / 2 for stage, seconds in enumerate(slowest) if stage != SLOW)


@ranks(2)
def test_a_transfer_would_be_counted() -> None:
    """The count sees an exchange between stages, so that a zero means something."""
    from pp_free_warmup import prime_channels

    training = models.build(Layout(pp=2, layers=2, hidden=16, heads=2, seq=8, vocab=32))
    with megatron.transfers_counted() as counted:
        prime_channels(training.chunks)
        assert len(counted) == 2
    prime_channels(training.chunks)
    assert len(counted) == 2
