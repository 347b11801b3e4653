"""The comparison of GPU runs can fail: its verdicts, on records made by hand."""

from __future__ import annotations

import copy

import pytest

from tests.gpu.comparison import verdict
from tests.gpu.configurations import Configuration, base_layout, configurations

PLAIN = Configuration("plain", base_layout(2))
CONTROL = Configuration("control", base_layout(2), without=("rng",))
RL = Configuration("rl", base_layout(2), forward_only_first=True)
WARMED = {"kind": "training", "outcome": "warmed"}


def _ranks(**fields):
    step = {"loss[0].lm loss": "a", "state.counter": "1", **fields}
    return [{"fields": [dict(step), dict(step)], "losses": [1.0], "warmups": [WARMED]} for _ in range(2)]


def test_equal_runs_are_identical():
    """Three equal records are identical, and say how much was compared."""
    told = verdict(PLAIN, _ranks(), _ranks(), _ranks())
    assert (told["verdict"], told["compared"], told["differences"]) == ("identical", 8, [])


def test_one_number_on_one_rank_differs():
    """A single path of one step and rank is found and named."""
    warmed = _ranks()
    warmed[1]["fields"][1]["loss[0].lm loss"] = "b"
    told = verdict(PLAIN, _ranks(), warmed, _ranks())
    assert (told["verdict"], told["differences"]) == ("differs", ["step 1, rank 1: loss[0].lm loss"])


def test_a_path_that_only_the_warmed_run_has_differs():
    """A log entry that a cold run has not is a difference."""
    told = verdict(PLAIN, _ranks(), _ranks(**{"log.aux": "0"}), _ranks())
    assert told["verdict"] == "differs"


def test_only_the_state_differs():
    """A difference that only the walk over the state sees has a verdict of its own."""
    told = verdict(PLAIN, _ranks(), _ranks(**{"state.counter": "2"}), _ranks())
    assert told["verdict"] == "state differs"


def test_a_counter_of_the_process_is_left_out():
    """State that differs between the runs without the warmup is left out, and named."""
    told = verdict(PLAIN, _ranks(), _ranks(**{"state.counter": "2"}), _ranks(**{"state.counter": "3"}))
    assert (told["verdict"], len(told["left_out"])) == ("identical", 4)


@pytest.mark.parametrize(
    "path",
    [
        "state.chunk0.module.mlp.linear_fc1.bias._dynamo_static_input_type",
        "state.chunk0.module.cudagraph_manager.cudagraph_runners[1].static_grad_outputs[0]",
        "state.chunk0.module.cudagraph_manager.cudagraph_runners[0].fwd_graph_input_kwargs['hidden_states']",
    ],
)
def test_the_compilers_notes_and_the_graphs_scratch_may_differ(path):
    """What torch.compile notes of compiled code, and static buffers in the graphs' shared memory, are no difference."""
    told = verdict(PLAIN, _ranks(), _ranks(**{path: "0"}), _ranks())
    assert told["verdict"] == "identical"


def test_other_fields_of_a_graph_are_compared():
    """Whether a graph was captured, and what else its runner notes, is no scratch."""
    path = "state.chunk0.module.cudagraph_manager.cudagraph_runners[0].fwd_graph_recorded"
    assert verdict(PLAIN, _ranks(), _ranks(**{path: "True"}), _ranks())["verdict"] == "state differs"


def test_runs_that_disagree_by_themselves_are_not_comparable():
    """Two runs without the warmup that differ in a number make no verdict on the warmup."""
    told = verdict(PLAIN, _ranks(), _ranks(), _ranks(**{"loss[0].lm loss": "b"}))
    assert told["verdict"] == "not comparable"


def test_a_control_must_be_seen():
    """With a guard taken away, equal runs mean that the comparison is blind."""
    assert verdict(CONTROL, _ranks(), _ranks(), _ranks())["verdict"] == "blind"
    assert verdict(CONTROL, _ranks(), _ranks(**{"state.counter": "2"}), _ranks())["verdict"] == "noticed"


def test_a_skipped_warmup_proves_nothing():
    """A run whose warmup did not happen on some rank, or not for some kind, has no verdict."""
    skipped = copy.deepcopy(_ranks())
    skipped[1]["warmups"] = [{"kind": "training", "outcome": "skipped"}]
    assert verdict(PLAIN, _ranks(), skipped, _ranks())["verdict"] == "not warmed"
    assert verdict(RL, _ranks(), _ranks(), _ranks())["verdict"] == "not warmed"


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_layout_fits_its_ranks(world):
    """Names are unique, and stages, tensor and virtual parallelism divide what they must."""
    found = configurations(world)
    assert len({configuration.name for configuration in found}) == len(found)
    for layout in (configuration.layout for configuration in found):
        assert world % (layout.pp * layout.tp) == 0
        assert layout.layers % (layout.pp * (layout.vp or 1)) == 0
        assert layout.vp is None or layout.num_microbatches % layout.pp == 0
