"""NeMo-RL's `megatron_forward_backward`, in its form: warmed by a block, or by a decorator above it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from megatron.core import parallel_state
from nemo import PolicyWorker, megatron_forward_backward, rollout

from pp_free_warmup import pipeline_warmup, warm_first_call
from pp_free_warmup.testing import ranks
from pp_free_warmup.testing.models import Layout

RAGGED = Layout(variable_seq_lengths=True, tied=False)


def _live(switch: Any, call: Any = megatron_forward_backward) -> tuple[list[bytes], Any]:
    """Live through three rollouts from the same birth: log-probs of the policy and the reference, then training."""
    worker = PolicyWorker(RAGGED, call)
    with switch as warmup:
        for number in range(3):
            batch = rollout(RAGGED, number)
            worker.get_logprobs(batch)
            with worker.use_reference_model():
                worker.get_logprobs(batch)
            worker.train(batch)
    parallel_state.destroy_model_parallel()
    return worker.trace, warmup


@ranks(2)
@pytest.mark.parametrize("form", ["block", "verified block", "decorator"])
def test_a_policy_worker_computes_the_same(form):
    """Log-probs, losses, gradient norms and parameters of ragged dynamic batches are equal over three rollouts."""
    cold, _ = _live(nullcontext())
    if form == "decorator":
        decorated = warm_first_call(megatron_forward_backward)
        warmed, warmup = *_live(nullcontext(), decorated)[:1], decorated.warmup
    else:
        warmed, warmup = _live(pipeline_warmup(verify=form == "verified block"))

    assert [(report.kind, report.outcome) for report in warmup.reports] == [
        ("forward-only", "warmed"),
        ("training", "warmed"),
    ]
    assert len(cold) > 3
    assert warmed == cold
