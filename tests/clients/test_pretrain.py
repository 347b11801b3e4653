"""Megatron-LM's own ``pretrain()``, unchanged: the same numbers to the bit, however the warmup is switched on."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from pp_free_warmup.testing import run_on_ranks

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip("this release's wheel has no megatron.training", allow_module_level=True)

from pretraining import Job, Observed, run, run_without_a_guard

NO_EVALUATION = ("--eval-interval", "1000", "--eval-iters", "0")
EVALUATION = ("--eval-interval", "2", "--eval-iters", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
LAYOUTS = {
    "pp2": (2, PP2),
    "pp2 x vp2": (2, (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")),
    "pp4": (4, ("--pipeline-model-parallel-size", "4")),
    "pp2 x dp2, overlapped": (
        4,
        (*PP2, "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
}
MICROBATCHES = 4
pytestmark = pytest.mark.ranks


def _on(ranks: int, *jobs: Job) -> list[list[Observed]]:
    """Run the jobs on *ranks* processes; return, per job, what each rank observed."""
    return [list(seen) for seen in zip(*run_on_ranks(run, ranks, *jobs, timeout=240), strict=True)]


def _traces(seen: list[Observed]) -> list[Any]:
    return [rank.trace for rank in seen]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_switch_gives_the_numbers_of_a_run_without_a_warmup(layout):
    """Off, a block, the flag, and a warmup in the third iteration: losses, inputs and parameters are equal."""
    ranks, arguments = LAYOUTS[layout]
    off = Job((*arguments, *NO_EVALUATION))
    cold, *warmed = _on(ranks, off, off.switched("block"), off.switched("flag"), off.switched("middle"))
    chunks = 2 if "vp2" in layout else 1
    microbatches = MICROBATCHES // (2 if "dp2" in layout else 1)

    for seen in warmed:
        assert _traces(seen) == _traces(cold)
        assert [rank.passes for rank in seen] == [chunks] * ranks
    assert [rank.passes for rank in cold] == [0] * ranks
    assert [rank.first for seen in warmed for rank in seen] == ([0] * 2 * ranks + [2 * microbatches * chunks] * ranks)
    assert all(len(rank.trace.inputs) == off.iterations * microbatches * chunks for rank in cold)
    assert len(set(cold[-1].trace.losses)) == off.iterations * microbatches
    assert len([name for name, _ in cold[-1].trace.printed if name == "lm loss"]) == off.iterations


def test_without_the_flag_nothing_is_warmed():
    """A block that asks for the flag leaves a run without it alone, and says so in its report."""
    off = Job((*PP2, *NO_EVALUATION), iterations=2)
    cold, without = _on(2, off, off.switched("no flag"))

    assert _traces(without) == _traces(cold)
    assert [rank.passes for rank in without] == [0, 0]
    assert without[0].reports == [("training", "skipped")]


@pytest.mark.parametrize("layout", ["pp2", "pp2 x vp2"])
def test_evaluation_inside(layout):
    """Evaluation is warmed once as well, apart from training, and prints the same values."""
    ranks, arguments = LAYOUTS[layout]
    off = Job((*arguments, *EVALUATION))
    cold, block, middle = _on(ranks, off, off.switched("block"), off.switched("middle"))

    assert _traces(block) == _traces(middle) == _traces(cold)
    assert block[0].reports == [("training", "warmed"), ("forward-only", "warmed")]
    assert middle[0].reports == [("training", "skipped"), ("training", "warmed")]
    assert [name for name, _ in cold[-1].trace.printed].count("lm loss value") == 4


@pytest.mark.parametrize("mode", [(), ("--rerun-mode", "disabled")], ids=["default", "disabled"])
def test_a_loss_that_is_not_a_number_in_the_warmup(mode):
    """Megatron's check of losses neither ends nor reruns a step for what the warmup computed."""
    off = Job((*PP2, *NO_EVALUATION, *mode), not_a_number=True)
    cold, block, middle = _on(2, off, off.switched("block"), off.switched("middle"))

    assert _traces(block) == _traces(middle) == _traces(cold)
    assert [rank.passes for rank in (*block, *middle)] == [1, 1, 1, 1]


@pytest.mark.parametrize("layout", ["pp2", "pp2 x vp2"])
def test_a_checkpoint_is_resumed_and_the_model_warmed_again(layout, tmp_path):
    """Three iterations, saved; then a new model, loaded, and three more: each of the two models is warmed."""
    ranks, arguments = LAYOUTS[layout]
    jobs = []
    for switch in ("off", "block"):
        folder = str(tmp_path / switch)
        common = (*arguments, *NO_EVALUATION, "--ckpt-format", "torch")  # the default one wants psutil
        jobs.append(Job((*common, "--save", folder, "--save-interval", "3"), switch, iterations=3))
        jobs.append(Job((*common, "--load", folder, "--override-opt_param-scheduler"), switch, iterations=6))
    saved, resumed, saved_warmed, resumed_warmed = _on(ranks, *jobs)

    assert _traces(saved_warmed) == _traces(saved)
    assert _traces(resumed_warmed) == _traces(resumed)
    assert saved[0].trace.final != resumed[0].trace.final
    assert len([name for name, _ in resumed[-1].trace.printed if name == "lm loss"]) == 3
    passes = 2 if "vp2" in layout else 1  # one per chunk
    assert [rank.passes for rank in (*saved_warmed, *resumed_warmed)] == [passes] * 2 * ranks


def test_the_comparison_can_fail():
    """With the random numbers left as the warmup leaves them, the same run prints other losses."""
    job = Job((*PP2, *NO_EVALUATION), iterations=2)
    cold, warmed = zip(*run_on_ranks(run_without_a_guard, 2, "rng", job, job.switched("block")), strict=True)

    assert _traces(list(cold))[-1].losses != _traces(list(warmed))[-1].losses
