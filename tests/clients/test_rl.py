"""RL actors in the forms of slime and miles: log-probs first, then training, rollout after rollout."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from reloadable import Reloading, reloadable_groups
from rollouts import NUM_MICROBATCHES, Actor, ByIndices, BySize, rollout

from pp_free_warmup import pipeline_warmup, prime_channels, warm_first_call
from pp_free_warmup.testing import models, ranks
from pp_free_warmup.testing.models import Layout

RAGGED = Layout(variable_seq_lengths=True, tied=False)
RAGGED_VIRTUAL = Layout(variable_seq_lengths=True, tied=False, vp=2)
ROUTED = Layout(variable_seq_lengths=True, tied=False, moe=True, recompute="full")
KINDS = {"slime": ByIndices, "miles": BySize}


def _live(actor: Actor, flavour: str, rollouts: int = 2, between: Any = None) -> list[Any]:
    """Live through some rollouts; return the iterators of each."""
    seen = []
    for number in range(rollouts):
        if number and between is not None:
            between()
        iterators = rollout(actor.layout, number, KINDS[flavour])
        actor.forward_only(iterators)
        actor.forward_only(iterators)
        actor.train(iterators)
        seen.append(iterators)
    return seen


def _cold_then(layout: Layout, flavour: str) -> tuple[Actor, Actor]:
    """Return an actor that lived without a warmup, and one as it was at its birth."""
    cold = Actor(layout, flavour)
    _live(cold, flavour)
    parallel_state.destroy_model_parallel()
    models.parallel(layout.pp, layout.vp)
    return cold, Actor(layout, flavour)


@ranks(2)
@pytest.mark.parametrize("flavour", KINDS)
@pytest.mark.parametrize("virtual", [False, True])
def test_an_actor_computes_the_same_in_a_block(flavour, virtual):
    """Log-probs, losses and parameters are those of an actor without a warmup; every batch was read once."""
    layout = RAGGED_VIRTUAL if virtual else RAGGED
    cold, warmed = _cold_then(layout, flavour)
    with pipeline_warmup(verify=True) as warmup:
        seen = _live(warmed, flavour)

    chunks = layout.vp or 1
    assert warmed.trace == cold.trace
    assert [report.kind for report in warmup.reports] == ["forward-only", "training"]
    assert (cold.passes, warmed.passes) == (0, 2 * chunks)
    assert all(iterator.offset == iterator.end for iterators in seen for iterator in iterators)
    assert len(warmed.trace.batches) == 6 * sum(NUM_MICROBATCHES) * chunks
    assert len(set(warmed.trace.parameters)) == 4
    assert bool(warmed.trace.numbers) is (dist.get_rank() == 1)


@ranks(2)
def test_an_actor_computes_the_same_through_a_decorated_method():
    """Decorated methods fetch their schedules inside: each kind is warmed in its own."""
    cold, warmed = _cold_then(RAGGED, "slime")
    warmed.forward_only = warm_first_call(warmed.forward_only, verify=True)  # type: ignore[method-assign]
    warmed.train = warm_first_call(warmed.train, verify=True)  # type: ignore[method-assign]
    _live(warmed, "slime")

    assert warmed.trace == cold.trace
    assert warmed.forward_only.warmup.report.kind == "forward-only"  # type: ignore[attr-defined]
    assert warmed.train.warmup.report.kind == "training"  # type: ignore[attr-defined]


@ranks(2)
def test_what_the_forward_steps_owner_counts_is_put_back():
    """A progress bar, kept by the object whose method the forward step is, does not move in a pass."""
    cold, warmed = _cold_then(RAGGED, "slime")
    with pipeline_warmup(verify=True):
        _live(warmed, "slime")

    assert warmed.passes
    assert warmed.progress == cold.progress


@ranks(2)
def test_the_made_up_activation_has_the_length_of_the_batch():
    """With variable lengths the pass runs at the first batch's own length on every stage."""
    actor = Actor(RAGGED, "slime")
    shapes: list[tuple[int, ...]] = []
    chunk = actor.training.chunks[0].module
    layer = chunk.decoder.layers[0]
    hook = layer.register_forward_pre_hook(
        lambda module, arguments, named: shapes.append(tuple((arguments or [named["hidden_states"]])[0].shape)),
        with_kwargs=True,
    )
    with pipeline_warmup():
        _live(actor, "slime", rollouts=1)
    hook.remove()

    assert shapes[0] == shapes[1]
    assert shapes[0][1:] == (1, RAGGED.hidden)
    assert len({shape[0] for shape in shapes}) > 1


def _sleep_and_wake(groups: Reloading, *, with_the_world: bool = False) -> Any:
    def between() -> None:
        (groups.sleep_with_the_world if with_the_world else groups.sleep)()
        groups.wake_up()

    return between


@ranks(2)
@pytest.mark.parametrize("with_the_world", [False, True])
@pytest.mark.parametrize("flavour", KINDS)
def test_groups_that_are_rebuilt_have_their_channels_opened_again(flavour, with_the_world):
    """After sleep and wake-up the first call opens the new channels for both kinds, and compiles nothing."""
    with reloadable_groups() as groups:
        actor = Actor(RAGGED, flavour)
        assert groups.groups
        with pipeline_warmup(verify=True) as warmup:
            _live(actor, flavour, rollouts=3, between=_sleep_and_wake(groups, with_the_world=with_the_world))
        parallel_state.destroy_model_parallel()

    told = [(report.kind, report.outcome) for report in warmup.reports]
    assert told == [("forward-only", "warmed"), ("training", "warmed"), *[("forward-only", "primed")] * 2]
    assert actor.passes == 2
    assert "pass" not in warmup.report.seconds


@ranks(2)
def test_rebuilt_groups_change_no_number():
    """An actor that sleeps between rollouts computes the same with and without the block."""
    traces = []
    for switch in (nullcontext, partial(pipeline_warmup, verify=True)):
        with reloadable_groups() as groups:
            actor = Actor(RAGGED, "slime")
            with switch():
                _live(actor, "slime", rollouts=3, between=_sleep_and_wake(groups))
            parallel_state.destroy_model_parallel()
        traces.append(actor.trace)

    assert traces[0] == traces[1]


@ranks(2)
def test_channels_can_be_opened_by_hand_after_a_rebuild():
    """Without a block around the loop, `prime_channels` opens what the wake-up closed."""
    with reloadable_groups() as groups:
        actor = Actor(RAGGED, "slime")
        with pipeline_warmup(verify=True):
            _live(actor, "slime", rollouts=1)
        _sleep_and_wake(groups)()
        first, second = prime_channels(actor.training.chunks), prime_channels(actor.training.chunks)
        parallel_state.destroy_model_parallel()

    assert first.opened == ("forward", "backward")
    assert second.opened == ()


@ranks(2)
@pytest.mark.parametrize("virtual", [False, True])
def test_recorded_routes_are_replayed_as_without_a_warmup(virtual):
    """What hangs on routers and counts is as if no pass had been: routes, losses and parameters are equal."""
    pytest.importorskip("megatron.core.transformer.moe.router_replay")
    layout = replace(ROUTED, vp=2) if virtual else ROUTED
    traces = []
    for switch in (nullcontext, pipeline_warmup):  # verify would name the global that every forward sets anew
        models.parallel(layout.pp, layout.vp)
        actor = Actor(layout, "slime", replaying=True)
        with switch() as warmup:
            for number in range(3):
                iterators = rollout(layout, number, ByIndices)
                actor.forward_only(iterators, stage="record")
                actor.train(iterators)
                assert {len(replay.top_indices_list) for replay in actor.replays} == {sum(NUM_MICROBATCHES)}
                assert all(replay.consumed for replay in actor.replays)
                for replay in actor.replays:
                    replay.clear()
        parallel_state.destroy_model_parallel()
        traces.append(actor.trace)

    assert [report.outcome for report in warmup.reports] == ["warmed", "warmed"]
    assert traces[0] == traces[1]


@ranks(2)
def test_a_reference_and_a_critic_inside_the_actors_block():
    """Only the actor is warmed; the two others compute what they would have."""
    actor, critic = Actor(RAGGED, "slime"), Actor(RAGGED, "slime")
    with pipeline_warmup(actor.training.chunks, verify=True) as warmup:
        _live(critic, "slime", rollouts=1)
        _live(actor, "slime", rollouts=1)

    assert (actor.passes, critic.passes) == (2, 0)
    assert len(warmup.reports) == 2
