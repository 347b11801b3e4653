"""What a report says: in one line, as a table, as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from pp_free_warmup._report import StageReport, Stopwatch, WarmupReport

WARMED = WarmupReport(
    outcome="warmed",
    kind="training",
    seconds={"save": 0.01, "forward[0]": 2.0, "backward[0]": 1.0, "pass": 3.0, "channels": 0.25},
    total_s=3.5,
    stages=(
        StageReport(
            0,
            2,
            {"forward[0]": 1.5, "pass": 2.0},
            {"forward[0]": 2.0, "pass": 3.0},
            {"forward[0]": 4, "pass": 4},
            {"forward[0]": 6, "pass": 6},
        ),
        StageReport(
            1,
            2,
            {"forward[0]": 4.0, "backward[0]": 2.5, "pass": 7.0},
            {"forward[0]": 4.0, "backward[0]": 2.5, "pass": 7.001},
        ),
    ),
)


def test_the_headline_of_a_warmup_names_the_slowest_stage():
    """One line says what was warmed, how long it took, and how far the stages are apart."""
    assert WARMED.headline() == (
        "pp_free_warmup: training warmed in 3.5 s; slowest stage 7.0 s, quickest 3.0 s; channels 0.25 s"
    )


def test_the_headline_of_opened_channels_has_no_stages():
    """Where only channels were opened, no stage's pass is named."""
    report = WarmupReport("primed", "training", seconds={"channels": 0.5}, total_s=0.75)

    assert report.headline() == "pp_free_warmup: training primed in 0.8 s; channels 0.50 s"


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (WarmupReport("skipped", "training", reason="one stage"), "pp_free_warmup: skipped: one stage"),
        (WarmupReport("skipped"), "pp_free_warmup: skipped"),
        (WarmupReport("failed", reason="no such kernel"), "pp_free_warmup: failed: no such kernel"),
        (WarmupReport("not called"), "pp_free_warmup: not called"),
    ],
)
def test_a_skip_says_why_and_nothing_else(report, line):
    """Without a warmup the whole report is one line."""
    assert report.headline() == line
    assert str(report) == line


@pytest.mark.parametrize(
    "reason",
    [
        "config.cpu_offloading=True: its context learns [te-cpu-offload]; turn it off",
        "expected [s, b, 2, h], got [/dev/x] and [bold]nothing[/bold] of \\[this] :warning:",
        "rank 3: " + "a path that is long/" * 20,
    ],
)
def test_a_report_prints_what_it_was_given(reason):
    """Ids, shapes, paths and long lines come out as they are: nothing in a reason is markup."""
    skipped = WarmupReport("skipped", "training", reason=reason)
    failed = replace(WARMED, outcome="failed", reason=reason)

    assert str(skipped) == f"pp_free_warmup: skipped: {reason}"
    assert str(failed).splitlines()[0] == f"pp_free_warmup: failed: {reason}"


LOGGING = """
import logging, sys
from pp_free_warmup._agreement.ballot import Ballot
from pp_free_warmup._report import say
if sys.argv[1] == "drops warnings":
    dropping = lambda record: record.levelno != logging.WARNING
    logging.getLogger("pp_free_warmup").addFilter(dropping)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger().handlers[0].addFilter(dropping)
    logging.getLogger("pp_free_warmup").warning("never seen")
say("pp_free_warmup: 100 % of [te-cpu-offload]")
say("pp_free_warmup: said before", logging.DEBUG)
assert Ballot.watching.__wrapped__.__defaults__[0] is say  # progress goes the same way
"""


@pytest.mark.parametrize(
    ("trainer", "seen"),
    [
        ("says nothing about logging", "pp_free_warmup: 100 % of [te-cpu-offload]"),
        ("drops warnings", "NOTICE pp_free_warmup: 100 % of [te-cpu-offload]"),
    ],
)
def test_what_a_user_must_see_is_seen(trainer, seen):
    """Under Python's own defaults, and where records of level WARNING exactly are dropped, as Megatron-Bridge does."""
    line = [sys.executable, "-W", "ignore", "-c", LOGGING, trainer]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)

    assert ended.returncode == 0, ended.stderr
    assert [line for line in ended.stderr.splitlines() if "pp_free_warmup" in line] == [seen]  # torch may say more


def test_the_table_has_a_row_per_stage_and_a_column_per_phase():
    """`str` shows every stage's phases: one number, or the quickest and slowest rank's; a dash where there is none."""
    lines = str(WARMED).splitlines()
    cells = [[cell.strip() for cell in line.replace("\u2503", "\u2502").split("\u2502")[1:-1]] for line in lines]

    assert lines[0] == WARMED.headline()
    assert [row for row in cells if row] == [
        ["stage", "forward[0]", "pass", "backward[0]"],
        ["0", "1.50 rank 4", "2.00 rank 4", "-"],
        ["", "2.00 rank 6", "3.00 rank 6", ""],
        ["1", "4.00", "7.00", "2.50"],
    ]


def test_a_table_with_many_chunks_fits():
    """Four chunks per stage show every number in full, on lines of bounded length."""
    phases = {f"{what}[{chunk}]": 123.45 for chunk in range(4) for what in ("forward", "backward")}
    report = WarmupReport("warmed", "training", stages=(StageReport(0, 1, phases, phases),))

    assert str(report).count("123.45") == 8
    assert max(map(len, str(report).splitlines())) <= 110


def test_no_line_ends_in_blanks():
    """A report can be pasted into a log or a document as it is."""
    assert all(line == line.rstrip() for line in str(WARMED).splitlines())


def test_the_dictionary_is_ready_for_json():
    """`to_dict` holds plain values only, stages included, and loses nothing."""
    as_json = WARMED.to_dict()

    assert json.loads(json.dumps(as_json)) == as_json
    assert as_json["stages"][1]["most"]["pass"] == 7.001
    assert as_json["seconds"] == WARMED.seconds
    assert as_json["kind"] == "training"
    assert as_json["stages"][0]["slowest"] == {"forward[0]": 6, "pass": 6}


def test_a_stopwatch_adds_up():
    """A phase that is measured twice is the sum; phases of chunks have the chunk in their name."""
    stopwatch = Stopwatch()
    for _ in range(2):
        with stopwatch.measure("save"):
            pass
    once = dict(stopwatch.seconds)
    with stopwatch.measure("save"), stopwatch.measure("forward", 1):
        pass

    assert list(stopwatch.seconds) == ["save", "forward[1]"]
    assert stopwatch.seconds["save"] > once["save"]
    assert stopwatch.total >= stopwatch.seconds["save"] >= stopwatch.seconds["forward[1]"] > 0


def test_a_phase_that_raises_is_measured():
    """The time until an error counts too."""
    stopwatch = Stopwatch()
    with pytest.raises(ValueError, match="stop"), stopwatch.measure("pass"):
        raise ValueError("stop")

    assert stopwatch.seconds["pass"] > 0
