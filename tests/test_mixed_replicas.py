"""Data-parallel replicas that do not make the same calls: nobody waits, and every number is as without a warmup."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from pipelines import SMALL, call, heard, pipeline, start_anew

from pp_free_warmup import _patch, in_warmup, pipeline_warmup
from pp_free_warmup._ledger import FORWARD_ONLY, TRAINING, ledger
from pp_free_warmup.testing import models, ranks

PATIENT = 60.0
pytestmark = pytest.mark.ranks


def replica() -> int:
    """Return which of the two replicas this rank is of."""
    return int(parallel_state.get_data_parallel_rank())


def evaluate(training: Any, microbatches: int = 2) -> None:
    """Call the schedule without a backward."""
    with torch.no_grad():
        call(training, forward_only=True, num_microbatches=microbatches)


def nothing_to_evaluate(training: Any) -> None:
    """Evaluate with no microbatches on the second replica."""
    evaluate(training, 0 if replica() else 2)


def no_evaluation(training: Any) -> None:
    """Evaluate on the first replica alone."""
    if not replica():
        evaluate(training)


def nothing_by_turns(training: Any) -> None:
    """Evaluate with no microbatches on one replica, and the next time on the other."""
    turn = getattr(training, "turn", 0)
    training.turn = turn + 1
    evaluate(training, 0 if replica() == turn % 2 else 2)


def numbers(training: Any, before: Callable[[Any], None], steps: int = 3) -> list[Any]:
    """Take steps, each after *before*; return every loss, gradient norm and parameter."""
    found: list[Any] = []
    for _ in range(steps):
        before(training)
        record = training.step()
        found.append(([loss["lm loss"].tolist() for loss in record.losses], record.grad_norm))
    return [*found, *(p.detach().clone() for chunk in training.chunks for p in chunk.parameters())]


def equal(one: list[Any], other: list[Any]) -> bool:
    """Tell whether two runs agree to the bit."""
    alike = (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True))
    return all(alike)


@pytest.mark.parametrize(
    ("before", "outcomes"),
    [
        (nothing_to_evaluate, [(FORWARD_ONLY, "skipped"), (TRAINING, "warmed")]),
        (nothing_by_turns, [(FORWARD_ONLY, "skipped"), (TRAINING, "warmed")]),
        (no_evaluation, None),
    ],
)
@ranks(4)
def test_replicas_that_differ_run_as_without_a_warmup(before, outcomes) -> None:
    """Three steps with mixed evaluations agree to the bit, and nobody waits for a rank that does not come."""
    cold = numbers(pipeline(), before)
    start_anew(SMALL)
    warmed = pipeline()
    began = time.monotonic()
    with heard() as lines, pipeline_warmup(timeout=PATIENT) as warmup:
        found = numbers(warmed, before)
    seconds = time.monotonic() - began

    said = [(report.kind, report.outcome) for report in warmup.reports]
    assert equal(cold, found)
    assert seconds < PATIENT / 2
    assert len([line for line in lines if "skipped" in line]) == (dist.get_rank() == 0)
    assert said == (outcomes or [(TRAINING if replica() else FORWARD_ONLY, "skipped")])


@ranks(4)
def test_different_calls_in_one_vote_are_named_with_their_ranks() -> None:
    """The report says which ranks were in which call, and the next call of either kind does not vote."""
    training = pipeline()
    with heard() as lines, pipeline_warmup(timeout=PATIENT) as warmup:
        no_evaluation(training)
        training.step()
        evaluate(training)
        training.step()

    told = (
        "ranks that vote together are in different calls: a forward-only call of 1 chunk of GPTModel on ranks 0, 2; "
        "a training call of 1 chunk of GPTModel on ranks 1, 3; they run without a warmup"
    )
    assert [report.reason for report in warmup.reports] == [told]
    assert lines == ([f"pp_free_warmup: skipped: {told}"] if dist.get_rank() == 0 else [])
    assert training.forward_step.passes == 0


@ranks(4)
def test_an_actor_and_a_critic_in_one_vote_are_told_apart() -> None:
    """One replica scores with two models, the other with the second alone: seen in the vote, nobody waits."""
    actor, critic = pipeline(), pipeline(seed=2)
    inner = critic.chunks[0].module
    inner.__class__ = type("Critic", (type(inner),), {})
    with pipeline_warmup(timeout=PATIENT) as warmup:
        if not replica():
            evaluate(actor)
        evaluate(critic)
        training_is_open = critic.step()

    assert training_is_open.updated
    assert "1 chunk of Critic on ranks 1, 3" in warmup.reports[0].reason
    assert [(report.kind, report.outcome) for report in warmup.reports] == [
        (FORWARD_ONLY, "skipped"),
        (TRAINING, "warmed"),
    ]


@ranks(2)
def test_stages_in_different_calls_are_told_before_they_wait_for_each_other() -> None:
    """One stage trains and the other one scores: bare, both hang; here the log says why."""
    training = pipeline()
    with pipeline_warmup(timeout=PATIENT) as warmup:
        _call_nothing(training, forward_only=dist.get_rank() == 0)

    assert "a forward-only call of 1 chunk of GPTModel on rank 0; a training call of" in warmup.report.reason


@ranks(4)
def test_the_cold_rank_of_a_stage_is_named() -> None:
    """Where one rank of a stage alone compiles, the report says which one, in numbers and as a table."""
    cold = 3
    training = pipeline(also=lambda: time.sleep(1.0) if in_warmup() and dist.get_rank() == cold else None)
    with pipeline_warmup() as warmup:
        call(training)

    stage = warmup.report.to_dict()["stages"][1]
    assert (stage["slowest"]["forward[0]"], stage["quickest"]["forward[0]"]) == (cold, cold - 1)
    assert re.search(rf" 0\.\d\d rank {cold - 1} .*\n.* 1\.\d\d rank {cold} ", str(warmup.report))


@ranks(2)
def test_a_settled_kind_never_votes_again() -> None:
    """Once a kind is warm, or closed, a call without microbatches asks nobody: one rank may make it alone."""
    training = pipeline()
    with pipeline_warmup(timeout=PATIENT) as warmup:
        evaluate(training)
        if dist.get_rank() == 0:
            evaluate(training, 0)

    assert [report.outcome for report in warmup.reports] == ["warmed"]


@ranks(2)
def test_calls_without_microbatches_everywhere_leave_the_kind_open() -> None:
    """Where no rank has a microbatch nothing happens, however often, and the first one with some is warmed."""
    training = pipeline()
    with heard() as lines, pipeline_warmup(timeout=PATIENT) as warmup:
        for microbatches in (0, 0, 0, 2):
            evaluate(training, microbatches)

    assert [report.outcome for report in warmup.reports] == ["skipped", "warmed"]
    assert warmup.reports[0].reason == "rank 0: the call has no microbatches; rank 1: the call has no microbatches"
    assert len([line for line in lines if "no microbatches" in line]) == (dist.get_rank() == 0)


# --- rebuilt groups ---------------------------------------------------------------------------------------------------


def rebuild() -> None:
    """Build Megatron's groups again, as after a sleep."""
    parallel_state.destroy_model_parallel()
    models.parallel(SMALL.pp)


@ranks(2)
def test_rebuilt_groups_are_primed_once() -> None:
    """Whatever models and kinds are warm, each rebuilt group costs one vote and one priming, told once per process."""
    actor, critic = pipeline(), pipeline(seed=2)
    ledger._has_seen_rebuilt = False  # this process may have run another test

    def every_kind() -> None:
        for training in (actor, critic):
            evaluate(training)
            call(training)

    with heard() as lines, pipeline_warmup() as warmup:
        every_kind()
        for _ in range(3):
            rebuild()
            every_kind()

    assert [report.outcome for report in warmup.reports] == ["warmed"] * 4 + ["primed"] * 3
    assert len([line for line in lines if " primed in " in line]) == (dist.get_rank() == 0)
    assert actor.forward_step.passes == critic.forward_step.passes == 2


@ranks(2)
def test_warm_calls_of_two_kinds_open_rebuilt_channels_together() -> None:
    """Channels are the same for every kind: ranks that meet warm in different calls are primed, and none waits."""
    training = pipeline()
    with pipeline_warmup(timeout=PATIENT) as warmup:
        evaluate(training)
        call(training)
        rebuild()
        _call_nothing(training, forward_only=dist.get_rank() == 0)
        call(training)

    assert [report.outcome for report in warmup.reports] == ["warmed", "warmed", "primed"]


@ranks(2)
def test_a_kind_that_is_warmed_in_rebuilt_groups_serves_the_others() -> None:
    """Channels that were opened after a pass are open for kinds that were warm before."""
    training = pipeline()
    with pipeline_warmup(timeout=PATIENT) as warmup:
        call(training)
        rebuild()
        evaluate(training)
        call(training)

    assert [(report.kind, report.outcome) for report in warmup.reports] == [
        (TRAINING, "warmed"),
        (FORWARD_ONLY, "warmed"),
    ]


def _call_nothing(training: Any, **keywords: Any) -> None:
    """Call a schedule that does nothing through the armed block: two ranks need not make the same call."""
    arguments = {**training.schedule_arguments(), **keywords}
    _patch.armed()[-1].run(lambda **_: None, arguments)
