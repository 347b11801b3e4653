"""What every test starts from, and must leave behind: Megatron imported, and the process as it was."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Apex is absent, and what Megatron and torch deprecate of themselves
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401
    from megatron.core.pipeline_parallel import schedules

# What this library and its stand-ins for CUDA rebind, and must have put back when a test ends.
REBOUND: tuple[tuple[Any, str], ...] = (
    (schedules, "forward_backward_no_pipelining"),
    (schedules, "forward_backward_pipelining_with_interleaving"),
    (schedules, "forward_backward_pipelining_without_interleaving"),
    (schedules, "forward_step"),
    (schedules, "backward_step"),
    (torch, "zeros"),
    (torch, "rand"),
    (torch.cuda, "current_device"),
    (torch.cuda, "default_generators"),
    (torch.nn.functional, "dropout"),
)


def _fingerprint() -> dict[str, Any]:
    """Return what a test must leave as it found it; objects stand for themselves."""
    found = {f"{owner.__name__}.{name}": getattr(owner, name) for owner, name in REBOUND}
    ours = {name: value for name, value in os.environ.items() if name.startswith("PP_FREE_WARMUP")}
    return {**found, "environment": ours, "working directory": Path.cwd(), "grad mode": torch.is_grad_enabled()}


@pytest.fixture(autouse=True)
def _process_is_left_as_it_was() -> Iterator[None]:
    """Fail the test that left something of itself in the test process, not the one that trips over it."""
    before = _fingerprint()
    yield
    after = _fingerprint()
    changed = [name for name in before if after[name] is not before[name] and after[name] != before[name]]
    assert not changed, f"the test left a change behind in the test process: {', '.join(changed)}"
