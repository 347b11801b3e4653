"""A record sees everything that training computes, so that any difference between two runs shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._state_walk import StateWalk
from pp_free_warmup.testing import run_on_ranks
from pp_free_warmup.testing._recording import without_identity
from pp_free_warmup.testing.models import Layout, Training, build
from pp_free_warmup.testing.parity import differences, record

SMALL = Layout(layers=2)


def _draw_on_the_device(_training: Training) -> None:
    torch.rand(1, device="cuda")


def _draw_in_the_tracker(_training: Training) -> None:
    with megatron_random.get_cuda_rng_tracker().fork():
        torch.rand(1, device="cuda")


def _draw_on_the_cpu(_training: Training) -> None:
    torch.rand(1)


def _add_to_a_gradient(training: Training) -> None:
    """Add to gradients after they were zeroed: what a pass without a scratch buffer does."""
    training.zero_grad = lambda: None  # type: ignore[method-assign]
    next(training.chunks[0].parameters()).main_grad.add_(1e-3)


def _nudge_a_parameter(training: Training) -> None:
    with torch.no_grad():
        next(training.chunks[0].parameters()).view(-1)[0].mul_(1 + 2**-20)


def _consume_a_batch(training: Training) -> None:
    if training.iterators[0] is not None:
        next(training.iterators[0])


def _leave_a_field(training: Training) -> None:
    training.chunks[0].module.left_behind = 1


LEAKS: dict[str, tuple[Callable[[Training], None], str]] = {
    "device generator": (_draw_on_the_device, "step 0: activation."),
    "tracker": (_draw_in_the_tracker, "step 0: activation."),
    "cpu generator": (_draw_on_the_cpu, "step 0: random.torch"),
    "gradient": (_add_to_a_gradient, "step 0: main_grad."),
    "parameter": (_nudge_a_parameter, "step 0: parameter."),
    "batch": (_consume_a_batch, "step 0: activation."),
    "field": (_leave_a_field, "step 0: state.chunk0.module.left_behind"),
}


def _compare(leak: str | None) -> list[str]:
    """Record a run that is disturbed before its first schedule call, and one that is not."""

    @contextmanager
    def disturbed(training: Training) -> Iterator[None]:
        if leak is not None:
            LEAKS[leak][0](training)
        yield

    return differences(record(SMALL, 2), record(SMALL, 2, around=disturbed), limit=10_000)


def test_two_plain_runs_agree_to_the_bit() -> None:
    """Without a disturbance nothing differs, in one process and from the same seed."""
    assert run_on_ranks(_compare, 2, None) == [[], []]


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_is_named(leak: str) -> None:
    """Each kind of disturbance is found in the first step, under the name of what it changed."""
    found = run_on_ranks(_compare, 2, leak)

    assert all(any(line.startswith(LEAKS[leak][1]) for line in lines) for lines in found), found[0][:5]


def _lengths() -> tuple[int, list[str], list[str]]:
    long, short = record(SMALL, 3), record(SMALL, 2)
    return len(long), differences(long, short), sorted({path.partition(".")[0].partition("[")[0] for path in long[0]})


def test_runs_of_different_length_are_compared_as_far_as_both_go() -> None:
    """A shorter run agrees with the beginning of a longer one, and every kind of field is there."""
    for rank, (steps, found, kinds) in enumerate(run_on_ranks(_lengths, 2)):
        assert steps == 3
        assert found == []
        assert {"activation", "grad_norm", "main_grad", "parameter", "random", "state", "tracker"} <= {*kinds}
        assert ("loss" in kinds) == (rank == 1)


def _other_seed() -> list[str]:
    return differences(record(SMALL, 1), record(SMALL, 1, seed=2), limit=3)


def test_differences_stop_at_the_limit() -> None:
    """Runs that have nothing in common give as many lines as asked for, each with step and path."""
    lines: list[Any] = run_on_ranks(_other_seed, 2)[0]

    assert len(lines) == 3
    assert all(line.startswith("step 0: ") and " -> " in line for line in lines)


def _shared_state() -> list[str]:
    """Compare a run on rank 0's own with what a step that only one rank disturbs gives."""

    @contextmanager
    def on_rank_0(training: Training) -> Iterator[None]:
        if dist.get_rank() == 0:
            _nudge_a_parameter(training)
        yield

    return differences(record(SMALL, 2), record(SMALL, 2, around=on_rank_0), limit=10_000)


def test_a_leak_on_one_rank_shows_on_the_others() -> None:
    """What one stage changes reaches the next stage's activations."""
    found = run_on_ranks(_shared_state, 2)

    assert any("activation." in line for line in found[1])


def test_an_address_in_a_key_is_no_state() -> None:
    """Transformer Engine's keys spell out a recipe, 600 characters long, and then a process group's address."""
    recipe = "recipe=" + 100 * "scale=1, "
    first, second = StateWalk(), StateWalk()
    first.visit("arguments", {f"{recipe}group=140737351": 1})
    second.visit("arguments", {f"{recipe}group=140799999": 1})

    assert first.fields != second.fields
    assert without_identity(first.fields) == without_identity(second.fields)


def _compiled(layout: Layout, seed: int) -> Training:
    training = build(layout, seed)
    for layer in megatron.unwrapped(training.chunks[0]).decoder.layers:
        layer.mlp = torch.compile(layer.mlp, backend="eager")
    return training


def _compare_compiled() -> list[str]:
    return differences(*(record(SMALL, 2, make=_compiled) for _ in range(2)))


def test_a_compiled_module_is_recorded() -> None:
    """A model with compiled parts runs and is written down like any other."""
    assert run_on_ranks(_compare_compiled, 2) == [[], []]
