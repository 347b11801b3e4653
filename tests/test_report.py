"""What a report says: in one line, as a table, as JSON."""

from __future__ import annotations

import json

import pytest

from pp_free_warmup._report import StageReport, Stopwatch, WarmupReport

WARMED = WarmupReport(
    outcome="warmed",
    kind="training",
    seconds={"save": 0.01, "forward[0]": 2.0, "backward[0]": 1.0, "pass": 3.0, "channels": 0.25},
    total_s=3.5,
    stages=(
        StageReport(0, 2, {"forward[0]": 1.5, "pass": 2.0}, {"forward[0]": 2.0, "pass": 3.0}),
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


def test_the_table_has_a_row_per_stage_and_a_column_per_phase():
    """`str` shows every stage's phases: one number, or from quickest to slowest rank; a dash where there is none."""
    lines = str(WARMED).splitlines()
    cells = [[cell.strip() for cell in line.replace("\u2503", "\u2502").split("\u2502")[1:-1]] for line in lines]

    assert lines[0] == WARMED.headline()
    assert [row for row in cells if row] == [
        ["stage", "forward[0]", "pass", "backward[0]"],
        ["0", "1.50-2.00", "2.00-3.00", "-"],
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
