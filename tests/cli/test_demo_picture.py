"""The picture of the first step: every stage, without and with the warmup, and no moment left out."""

from __future__ import annotations

import re
import sys

import pytest
from made_up_records import CHANNELS_S, STEADY_S, pair

from pp_free_warmup._cli import main
from pp_free_warmup._cli._picture import draw
from pp_free_warmup._cli._plan import Plan
from pp_free_warmup._cli._segments import BACKWARD, CHANNELS, FORWARD, REAL, WAITING, segments


def _rows(svg):
    """Return the panel and stage of every bar in the picture."""
    return set(re.findall(r'id="(without|with), stage (\d+), ', svg))


@pytest.mark.parametrize("pp", [2, 8])
def test_every_stage_has_a_row_in_both_panels(tmp_path, pp):
    """Each stage has bars without and with the warmup."""
    path = tmp_path / "first_step.svg"
    draw(pair(pp), Plan(pp=pp), path)

    assert _rows(path.read_text()) == {(panel, str(stage)) for panel in ("without", "with") for stage in range(pp)}


def test_a_png_is_a_png(tmp_path):
    """The name's ending chooses the format."""
    path = tmp_path / "first_step.png"
    draw(pair(), Plan(), path)

    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_the_same_runs_give_the_same_file(tmp_path):
    """An SVG holds no date and no random names, so that it can be kept under version control."""
    for name in ("one.svg", "other.svg"):
        draw(pair(), Plan(), tmp_path / name)

    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()


def test_a_cold_stage_waits_between_its_compiles():
    """The last of three stages waits for the others' forwards, compiles, and waits for their backwards."""
    bars = segments(pair(pp=3).cold.ranks[2])

    assert [bar.kind for bar in bars] == [WAITING, FORWARD, BACKWARD, WAITING, REAL]
    assert [bar.seconds for bar in bars] == pytest.approx([4.0, 2.0, 2.0, 4.0, STEADY_S])


def test_a_warm_stage_never_waits():
    """Stages of equal cost compile, open their channels and go on to the real step."""
    bars = segments(pair(pp=3).warm.ranks[2])

    assert [bar.kind for bar in bars] == [FORWARD, BACKWARD, CHANNELS, REAL]
    assert [bar.seconds for bar in bars] == pytest.approx([2.0, 2.0, CHANNELS_S, STEADY_S])


def test_no_moment_is_drawn_twice_or_left_out():
    """A stage's bars follow one another without gap from the begin to the end of its first step."""
    runs = pair(pp=4)
    for rank in (*runs.cold.ranks, *runs.warm.ranks):
        bars = segments(rank)
        ends = [rank.steps[0].began, *(bar.ended for bar in bars)]

        assert [bar.began for bar in bars] == pytest.approx(ends[:-1])
        assert ends[-1] == rank.steps[0].ended


def test_a_missing_matplotlib_is_told_before_the_runs(monkeypatch, capsys):
    """Without matplotlib the picture is refused at once, with the extra's name."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--picture", "first_step.svg"])

    assert ended.value.code == 2
    assert "pip install 'pp-free-warmup[picture]'" in capsys.readouterr().err
