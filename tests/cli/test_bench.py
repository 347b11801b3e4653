"""The bench: in which order it runs, what it makes of its runs, and a tiny one over gloo."""

from __future__ import annotations

import copy
import json

import pytest

from pp_free_warmup._cli import _bench_results as results
from pp_free_warmup._cli import _bench_runs, main
from pp_free_warmup._cli._bench_cases import cases


def _phases(schedule):
    """The phases of a first and two steady cycles; the first train call takes *schedule* seconds."""
    steady = {"log-probs schedule": 0.1, "train schedule": 0.3, "train finalize": 0.1, "meet": 9.0, "optimizer": 0.1}
    cycles = {f"{n}/{name}": {"seconds": seconds} for n in range(3) for name, seconds in steady.items()}
    return {"": {"seconds": 5.0}, **cycles, "0/train schedule": {"seconds": schedule}, "0/optimizer": {"seconds": 0.5}}


def _run(*, warmed, first=10.0, number=1, made="a", caches="cold"):
    """One run of two ranks, whose stages cost 4 and 3 seconds."""
    report = {"outcome": "warmed", "total_s": 2.0, "seconds": {"channels": 0.25}}
    ranks = [
        {
            "rank": rank,
            "began": 100.0 + rank,
            "ended": 100.0 + first - rank,
            "memory": {"peak_bytes": 1000 + 10 * warmed, "main_grad_bytes": 8, "activation_bytes": 4, "batch_bytes": 2},
            "own_s": {} if warmed else {"forward 0": 1.0, "forward 3": 1.0, "backward 4": 2.0 - rank},
            "warmups": [report, report] if warmed else [],
            "phases": _phases(0.5 if warmed else 6.0),
            "made": {"loss": made},
            "probe": {},
        }
        for rank in range(2)
    ]
    return {"case": "te", "caches": caches, "warmed": warmed, "number": number, "ranks": ranks, "wall_s": 1.0}


def _summary(*runs):
    (case,) = results.summarize(runs, shared=False)
    return case


def test_with_and_without_alternate():
    """A-B-A at first, so that runs without can be held against each other early, and never the same twice in a row."""
    turns = _bench_runs.turns(cases("cuda", pp=2)[:1], repeat=3)
    cold = [(turn.warmed, turn.number) for turn in turns if turn.caches == "cold"]

    assert cold == [(False, 1), (True, 1), (False, 2), (True, 2), (False, 3), (True, 3)]
    assert not any(" " in turn.folder for turn in turns)  # Inductor's call of g++ does not survive one
    assert len({turn.folder for turn in turns if turn.caches == "cold"}) == 6
    assert {turn.folder for turn in turns if turn.caches == "warm"} == {turn.folder for turn in turns[:2]}


@pytest.mark.parametrize(("pp", "vp"), [(2, None), (4, None), (8, None), (4, 2)])
def test_every_stage_has_as_many_layers_at_any_number_of_stages(pp, vp):
    """First steps of more stages can be compared to those of fewer, since a stage stays the same."""
    for case in cases("cuda", pp=pp, vp=vp):
        assert case.layout.layers == 4 * pp
        assert case.layout.num_microbatches % pp == 0
        assert case.layout.num_microbatches >= 4


def test_the_numbers_of_a_case():
    """First step, slowest stage, warmup, residual, steady step and law are what the made-up seconds make them."""
    case = _summary(_run(warmed=False), _run(warmed=True, first=5.0))

    assert (case["cold_s"], case["warm_s"], case["ratio"]) == (10.0, 5.0, 2.0)
    assert case["slowest_stage_cold_s"] == 4.0
    assert (case["warmup_s"], case["channels_s"]) == (4.0, 0.5)
    assert case["residual"] == pytest.approx(1.5)
    assert case["steady_step_s"] == pytest.approx(0.5)
    assert case["optimizer_first_s"] == 0.5
    assert case["law"] == {"holds": True, "bound_s": pytest.approx(1.1 * 4.0 + 1.2 * 0.6 + 0.5)}
    assert (case["extra_peak_bytes"], case["extra_peak_promised_bytes"]) == (10, 14)
    assert case["identical"] is True
    assert "| te | cold, per rank | 10.00 s | 5.00 s | 2.00x | 4.00 s | holds" in results.table([case])


def test_a_step_above_the_bound_misses_the_law():
    """The law is not met by a warmed step slower than its slowest stage."""
    assert not _summary(_run(warmed=False), _run(warmed=True, first=7.0))["law"]["holds"]


def test_what_the_first_real_call_compiles_or_connects_is_counted():
    """One kernel and one communicator of the first real call are found; those of the warmup are not."""
    run = _run(warmed=True)
    phases = run["ranks"][1]["phases"]
    phases["0/train"] = {"seconds": 1.0, "graphs": ["DYNAMO"], "communicators": [2]}
    assert (results.kernels_after(run), results.communicators_after(run)) == (0, 0)

    phases["0/train schedule"] |= {"triton_compiled": 1, "communicators": [2]}
    phases["0/log-probs schedule"] |= {"counters": {"inductor.fxgraph_cache_miss": 1, "inductor.fxgraph_cache_hit": 5}}
    assert (results.kernels_after(run), results.communicators_after(run)) == (2, 1)


def test_bits_are_compared_over_all_runs_of_a_case():
    """One differing run with the warmup is told; if those without differ, nothing can be told."""
    without, warm = [_run(warmed=False), _run(warmed=False, number=2)], _run(warmed=True)
    assert results.equal([*without, warm]) is True
    assert results.equal([*without, warm, _run(warmed=True, made="b", caches="warm")]) is False

    other = copy.deepcopy(without[1])
    other["ranks"][1]["made"] = {"loss": "b"}
    assert results.equal([without[0], other, warm]) == "not comparable: runs without the warmup differ"


def test_a_failed_run_costs_no_other():
    """A run with an error is left out; a case without a run of each kind has no numbers yet."""
    failed = {"case": "te", "caches": "cold", "warmed": True, "number": 1, "error": "boom", "wall_s": 1.0}
    assert results.summarize([_run(warmed=False), failed], shared=False) == []
    assert _summary(_run(warmed=False), failed, _run(warmed=True))["runs"] == {"without": 1, "with": 1}


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_tiny_bench_over_gloo(tmp_path, capsys):
    """Real runs give a record with every promised field, equal to the bit, and nothing compiled afterwards."""
    out = tmp_path / "bench.json"
    status = main(["bench", "--device", "cpu", "--repeat", "1", "--steady", "2", "--cold-only", "--out", str(out)])
    written = json.loads(out.read_text())
    (case,) = written["cases"]

    assert status == 0, capsys.readouterr().out
    assert (case["identical"], case["kernels_after"], case["communicators_after"]) == (True, 0, 0)
    assert case["warm_s"] > case["warmup_s"] > case["channels_s"] > 0
    assert case["cold_s"] > case["slowest_stage_cold_s"] > 0
    assert case["residual"] > 0
    assert [(run["warmed"], len(run["ranks"])) for run in written["runs"]] == [(False, 2), (True, 2), (False, 2)]
    assert [report["kind"] for report in written["runs"][1]["ranks"][0]["warmups"]] == ["forward-only", "training"]
    assert "| local-bf16 | cold, per rank |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tiny_profile_over_gloo(tmp_path):
    """Every probe compares every part, of both ranks."""
    out = tmp_path / "profile.json"
    status = main(["bench", "--device", "cpu", "--profile", "--steady", "2", "--out", str(out)])
    found = json.loads(out.read_text())["longer_in_the_first_call"]["local-bf16"]

    assert status == 0
    assert set(found) == {"spans", "operators", "functions"}
    for parts in found.values():
        assert {"log-probs schedule", "train schedule", "optimizer"} <= set(parts)
        assert all(set(ranks) == {"rank 0", "rank 1"} for ranks in parts.values())


def test_no_time_is_no_result(tmp_path, capsys):
    """With no time to begin a run, none is begun, and that is told and is a failure."""
    out = tmp_path / "bench.json"
    status = main(["bench", "--device", "cpu", "--repeat", "1", "--budget-s", "0.001", "--out", str(out)])

    assert status == 1
    assert "no time left" in capsys.readouterr().out
    assert json.loads(out.read_text())["cases"] == []
