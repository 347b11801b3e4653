"""ms-swift 4.6.0: its own Megatron main functions in a block train as they do outside one."""

from __future__ import annotations

import importlib.util

import pytest
import swift_megatron
import trials
from swift_megatron import Setup

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(importlib.util.find_spec("swift") is None, reason="needs ms-swift (nox -s clients)"),
]
BOTH = [("training", "warmed"), ("forward-only", "warmed")]
SETUPS = {
    "padded": Setup(),
    "packed": Setup((("padding_free", True),)),
    "preferences": Setup(preferences=True),
}


@pytest.mark.parametrize("name", SETUPS)
def test_iterations_are_equal(name):
    """What it logs, its state and the parameters of five iterations are equal, evaluation included."""
    trials.assert_equal_lives(swift_megatron.live, SETUPS[name], after=swift_megatron.load, warmups=BOTH)


def test_iterations_are_repeatable_without_the_warmup():
    """Two runs without it are equal: what differs with it is its doing."""
    first, second = (
        trials.lives(swift_megatron.live, Setup(preferences=True), after=swift_megatron.load, warmed=False)
        for _ in range(2)
    )
    assert first == second
