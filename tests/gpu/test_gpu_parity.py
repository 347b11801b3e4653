"""On GPUs, over NCCL: a training with the warmup is that without it, to the bit."""

from __future__ import annotations

import json

import pytest
import torch

from pp_free_warmup.testing._shared_gpu import spread
from tests.gpu import parity
from tests.gpu.configurations import configurations

WORLD = max(2, torch.cuda.device_count())


@pytest.fixture(scope="module", autouse=True)
def _environment():
    """Let the processes of these tests choose deterministic kernels."""
    obstacle = spread(WORLD).obstacle()
    if obstacle:
        pytest.skip(obstacle)
    parity.set_environment()


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("configuration", configurations(WORLD), ids=lambda configuration: configuration.name)
def test_training_is_equal_to_the_bit(configuration):
    """Losses, norms, gradients, parameters, activations, scales and random states are equal, or a control is seen."""
    lacking = parity.reason_not_to_run(configuration, "cuda")
    if lacking:
        pytest.skip(lacking)
    result = parity.compare(configuration, WORLD)
    assert result["verdict"] in ("identical", "noticed"), json.dumps(result, indent=1)
