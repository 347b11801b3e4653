"""Megatron-Bridge 0.6.2: its own `pretrain()` in a block trains as it does outside one."""

from __future__ import annotations

import importlib.util

import bridge_pretrain
import pytest
import trials
from bridge_pretrain import Setup

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason="needs megatron-bridge"),
]
TRAINING, FORWARD_ONLY = ("training", "warmed"), ("forward-only", "warmed")
VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("setup", "ranks", "warmups"),
    [
        pytest.param(Setup(), 2, [TRAINING], id="two stages"),
        pytest.param(Setup(model=VIRTUAL, evaluated=True), 2, [TRAINING, FORWARD_ONLY], id="interleaved, evaluated"),
        pytest.param(Setup(sharded=True), 4, [TRAINING], id="two replicas, sharded optimizer"),
    ],
)
def test_iterations_are_equal(setup, ranks, warmups):
    """Losses, gradient norms, parameters, evaluations and the whole state of training are equal."""
    trials.assert_equal_lives(bridge_pretrain.live, setup, after=bridge_pretrain.load, ranks=ranks, warmups=warmups)


def test_iterations_are_repeatable_without_the_warmup():
    """Two runs without it are equal: what differs with it is its doing."""
    first, second = (
        trials.lives(bridge_pretrain.live, Setup(), after=bridge_pretrain.load, warmed=False) for _ in range(2)
    )
    assert first == second
