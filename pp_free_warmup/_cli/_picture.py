"""The first step of every stage, without and with the warmup, on one time axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pp_free_warmup._cli._plan import Plan
from pp_free_warmup._cli._results import Pair, Run
from pp_free_warmup._cli._segments import BACKWARD, CHANNELS, FORWARD, KINDS, REAL, WAITING, Segment, segments

# Okabe and Ito's colours, which stay apart for colour-blind readers and in grey.
COLORS = {
    FORWARD: "#0072b2",
    BACKWARD: "#e69f00",
    WAITING: "#e8e8e8",
    CHANNELS: "#cc79a7",
    REAL: "#009e73",
}
INCHES_WIDE, INCHES_PER_STAGE, INCHES_AROUND = 10.0, 0.34, 2.3
SHORTEST_WAIT = 1 / 300  # of the axis: less than two pixels
ROOM_FOR_TEXT = 1 / 25  # of the axis


def draw(pair: Pair, plan: Plan, path: Path) -> None:
    """Draw one pair of runs.

    Args:
        pair: The runs.
        plan: What was run, for the title.
        path: Where to; ``.svg`` or ``.png``.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "pp_free_warmup", "hatch.linewidth": 0.4, "font.size": 9}):
        height = INCHES_AROUND + 2 * INCHES_PER_STAGE * plan.pp
        figure = Figure(figsize=(INCHES_WIDE, height), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        longest = max(pair.cold.first_step_s, pair.warm.first_step_s)
        _panel(above, pair.cold, longest, "without", f"{pair.cold.first_step_s:.2f} s")
        _panel(below, pair.warm, longest, "with", _told(pair))
        below.set_xlabel("seconds since the first step began")
        figure.suptitle(f"First step of a pipeline of {plan.title()}", fontsize=10)
        _legend(figure)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _told(pair: Pair) -> str:
    """Say in numbers what is too short to be seen."""
    warm = pair.warm
    parts = f"warmup {warm.warmup_s():.2f} s, of it channels {warm.warmup_s('channels'):.3f} s"
    return f"{warm.first_step_s:.2f} s, {pair.ratio:.2f} times faster ({parts})"


def _panel(axes: Any, run: Run, longest: float, name: str, told: str) -> None:
    """Draw one run: a row of bars per stage, and a line where the step ended."""
    axes.axvline(run.first_step_s, color="black", linewidth=0.8, linestyle="--", zorder=0)
    for rank in run.ranks:
        for bar in segments(rank, SHORTEST_WAIT * longest):
            middle = bar.began - run.zero + bar.seconds / 2
            drawn = axes.barh(rank.rank, bar.seconds, left=bar.began - run.zero, height=0.74, **_style(bar))
            drawn[0].set_gid(f"{name}, stage {rank.rank}, {bar.kind}")
            if bar.chunk is not None and bar.seconds > ROOM_FOR_TEXT * longest:
                _write(axes, rank.rank, middle, bar, several=any(span.chunk for span in rank.spans))
    axes.set_title(f"{name} the warmup: {told}", loc="left", fontsize=9, fontweight="bold")
    axes.set_yticks(range(len(run.ranks)), [f"stage {rank.rank}" for rank in run.ranks])
    axes.set_xlim(0, 1.01 * longest)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _write(axes: Any, row: int, middle: float, bar: Segment, *, several: bool) -> None:
    """Write into a bar how long it took, and of which chunk where there are several."""
    text = f"{bar.seconds:.1f} s"
    ink = "white" if bar.kind == FORWARD else "black"
    axes.text(
        middle, row, f"chunk {bar.chunk}\n{text}" if several else text, ha="center", va="center", color=ink, fontsize=7
    )


def _style(bar: Segment) -> dict[str, Any]:
    """Return how a bar looks: first uses stay apart, and the shortest bars keep a visible edge."""
    color = COLORS[bar.kind]
    if bar.kind == WAITING:
        return {"color": color, "edgecolor": "#aaaaaa", "linewidth": 0.5, "hatch": "////"}
    if bar.chunk is not None:
        return {"color": color, "edgecolor": "white", "linewidth": 0.5}
    return {"color": color, "edgecolor": color, "linewidth": 1.0, "zorder": 2}


def _legend(figure: Any) -> None:
    """Name the colours, below both panels."""
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=COLORS[kind], edgecolor="#aaaaaa", hatch="////" if kind == WAITING else None, label=kind)
        for kind in KINDS
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(KINDS), frameon=False)
