"""Draw the first step over the number of stages, from results of the bench.

``python docs/benchmarks/over_stages.py h200_pp2.json h200_pp4.json h200_pp8.json --out over_stages.svg``
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

LINES = (
    ("cold_s", "without", {"color": "#d55e00", "marker": "o"}),
    ("warm_s", "with the warmup", {"color": "#0072b2", "marker": "o"}),
    ("slowest_stage_cold_s", "slowest stage's own cost, without", {"color": "#555555", "marker": "s", "ls": "--"}),
    ("steady_step_s", "a steady step", {"color": "#009e73", "marker": "^", "ls": ":"}),
)


def points(documents: Sequence[dict[str, Any]], caches: str) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Return per case its records with *caches*, each beside its number of stages, fewest stages first."""
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for document in documents:
        for case in document["cases"]:
            if case["caches"].startswith(caches):
                name = re.sub(r"-pp\d+", "", case["name"])
                found.setdefault(name, []).append((document["models"][case["name"]]["pp"], case))
    return {name: sorted(records, key=lambda record: record[0]) for name, records in found.items()}


def draw(cases: dict[str, list[tuple[int, dict[str, Any]]]], path: Path) -> None:
    """Draw one panel per case; numbers stand at the points of the first two lines."""
    with mpl.rc_context({"svg.hashsalt": "pp_free_warmup", "font.size": 9}):
        figure = Figure(figsize=(4.2 * len(cases), 3.6), layout="constrained")
        panels = figure.subplots(1, len(cases), sharey=True, squeeze=False)[0]
        for axes, (name, records) in zip(panels, cases.items(), strict=True):
            _panel(axes, name, records)
        panels[0].set_ylabel("seconds: first log-probs and first step")
        panels[0].set_ylim(0, 1.12 * max(case["cold_s"] for records in cases.values() for _, case in records))
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axes: Any, name: str, records: list[tuple[int, dict[str, Any]]]) -> None:
    stages = [pp for pp, _ in records]
    for field, label, style in LINES:
        seconds = [case[field] for _, case in records]
        axes.plot(stages, seconds, label=label, **style)
        for x, y in zip(stages, seconds, strict=True) if field in ("cold_s", "warm_s") else ():
            axes.annotate(f"{y:.1f}", (x, y), xytext=(0, 5), textcoords="offset points", ha="center")
    axes.set_title(name, fontsize=9)
    axes.set_xticks(stages, [f"PP={pp}" for pp in stages])
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Read the results and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files that the bench has written")
    parser.add_argument("--caches", choices=("cold", "warm"), default="cold", help="which records to draw")
    parser.add_argument("--out", type=Path, default=Path("over_stages.svg"), help="the picture")
    arguments = parser.parse_args()
    draw(points([json.loads(path.read_text()) for path in arguments.results], arguments.caches), arguments.out)


if __name__ == "__main__":
    main()
