"""verl 0.9.1: rollouts of its own `TrainingWorker` compute the same with the warmup, switched on by three lines."""

from __future__ import annotations

import importlib.util

import pytest
import trials
import verl_worker
from verl_worker import Setup

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl (nox -s clients)"),
]
BOTH = [("forward-only", "warmed"), ("training", "warmed")]
SETUPS = {
    "packed": Setup(),
    "padded": Setup(packed=False),
    "interleaved": Setup(engine={"virtual_pipeline_model_parallel_size": 2}),
    "dynamic batch size": Setup(engine={"use_dynamic_bsz": True}),
    "offload": Setup(engine={"param_offload": True, "optimizer_offload": True}),
    "critic": Setup(critic=True),
    "router replay": Setup(replay=True),
    "router replay, interleaved": Setup(replay=True, engine={"virtual_pipeline_model_parallel_size": 2}),
}


@pytest.mark.parametrize("name", SETUPS)
def test_rollouts_are_equal(name):
    """Log-probs, metrics, gradient norms and parameters of three rollouts are equal; both kinds are warmed once."""
    trials.assert_equal_lives(verl_worker.live, SETUPS[name], after=verl_worker.load, warmups=BOTH)


def test_a_reference_model_in_the_process_is_warmed_apart():
    """The reference's log-probs do not use up the actor's warmup."""
    setup = Setup(reference=True)
    warmups = [("forward-only", "warmed"), *BOTH]
    trials.assert_equal_lives(verl_worker.live, setup, after=verl_worker.load, warmups=warmups)


def test_rollouts_are_repeatable_without_the_warmup():
    """Two lives without it are equal: what differs with it is its doing."""
    first, second = (
        trials.lives(verl_worker.live, SETUPS["packed"], after=verl_worker.load, warmed=False) for _ in range(2)
    )
    assert first == second
