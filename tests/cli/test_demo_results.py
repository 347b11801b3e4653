"""What the demo makes of its ranks' records: seconds, the law, and what differs."""

from __future__ import annotations

import io
import json

import pytest
from made_up_records import CHANNELS_S, STEADY_S, pair
from rich.console import Console

from pp_free_warmup._cli._plan import Plan
from pp_free_warmup._cli._results import Result
from pp_free_warmup._cli._table import show


def _shown(result):
    console = Console(file=io.StringIO(), width=200)
    show(result, console)
    return console.file.getvalue()


def test_the_first_step_lasts_until_the_last_rank_has_ended():
    """Without, two stages of 2 + 2 s take 8 s and a steady step; with, one stage's 4 s, channels and a steady step."""
    result = Result(Plan(), [pair()])

    assert result.cold_s == pytest.approx(8.0 + STEADY_S)
    assert result.warm_s == pytest.approx(4.0 + CHANNELS_S + STEADY_S)
    assert result.ratio == pytest.approx(8.1 / 4.6)
    assert result.steady_s == pytest.approx(STEADY_S)


def test_the_slowest_stages_part_leaves_waiting_out():
    """A stage's own part is its first forward and backward, whatever lies between them."""
    assert pair(pp=4).cold.slowest_stage_cold_s == pytest.approx(4.0)


def test_every_number_is_a_median_over_the_pairs():
    """Of three pairs, the one in the middle counts, and it is the one that is drawn."""
    pairs = [pair(cost=cost) for cost in (9.0, 2.0, 1.0)]
    result = Result(Plan(), pairs)

    assert result.cold_s == pairs[1].cold.first_step_s
    assert result.slowest_s == pytest.approx(4.0)
    assert result.typical is pairs[1]


@pytest.mark.parametrize(("cost", "holds"), [(2.0, False), (10.0, True)])
def test_the_law_can_hold_and_can_fail(cost, holds):
    """Half a second of channels is more than a tenth of 4 s, and less than a tenth of 20 s."""
    law = Result(Plan(), [pair(cost=cost)]).to_dict()["law"]

    assert law["holds"] is holds
    assert law["bound_s"] == pytest.approx(1.1 * 2 * cost + 1.2 * STEADY_S)


def test_the_law_does_not_apply_where_compilers_share_cores():
    """More compiling stages than cores are slower than each alone; sleeping ones are not."""
    assert not Result(Plan(pp=4096), [pair()]).law_applies
    assert Result(Plan(pp=4096, simulate_jit=1.0), [pair()]).law_applies


def test_equal_runs_are_identical():
    """Where every hash agrees, nothing differs, and the table says how much was compared."""
    result = Result(Plan(steps=4), [pair()])

    assert result.to_dict()["identical"] is True
    assert result.to_dict()["differences"] == []
    assert "equal to the bit (16 compared)" in _shown(result)


def test_one_other_bit_is_named():
    """A single hash that differs is named by step, rank and what it is of."""
    runs = pair()
    runs.warm.ranks[1].made[2]["gradient norm"] = "0x1.0000000000001p+0"
    result = Result(Plan(), [runs])

    assert result.to_dict()["identical"] is False
    assert result.to_dict()["differences"] == ["step 3, rank 1: gradient norm"]
    assert "1 of 16 DIFFER\n  step 3, rank 1: gradient norm" in _shown(result)


def test_what_only_one_run_made_differs():
    """A value that one of the runs lacks is a difference too."""
    runs = pair()
    del runs.warm.ranks[0].made[0]["loss[0].lm loss"]

    assert list(runs.differences()) == ["step 1, rank 0: loss[0].lm loss"]


def test_the_result_is_json():
    """The object has the documented keys and survives JSON."""
    found = json.loads(json.dumps(Result(Plan(pp=2, vpp=2, simulate_jit=0.5), [pair()]).to_dict()))

    assert found["without"]["first_step_s"] > found["with"]["first_step_s"] > found["with"]["warmup_s"]
    assert found["with"]["channels_s"] == CHANNELS_S
    assert {"ratio", "steady_step_s", "slowest_stage_cold_s", "identical", "differences"} <= found.keys()
    assert (found["pp"], found["vpp"], found["caches"], found["simulate_jit"]) == (2, 2, "per-rank", 0.5)


def test_the_table_names_the_cache_mode():
    """No ratio is shown without the cache mode that it was measured with."""
    assert "one compile cache per rank" in _shown(Result(Plan(), [pair()]))
    assert "one compile cache for all ranks" in _shown(Result(Plan(caches="shared"), [pair()]))
    assert "simulated, 2 s per forward" in _shown(Result(Plan(simulate_jit=2.0), [pair()]))
