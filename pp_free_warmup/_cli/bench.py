"""``bench``: measure first steps without and with the warmup, in fresh processes, and write the numbers down."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pp_free_warmup._cli._cores import cores_usable
from pp_free_warmup._cli._values import at_least, seconds
from pp_free_warmup._cli._which_megatron import imported_version
from pp_free_warmup._cli.doctor import DISTRIBUTIONS, installed
from pp_free_warmup.testing._shared_gpu import Spread, mark

if TYPE_CHECKING:
    from pp_free_warmup._cli._bench_cases import Case

DESCRIPTION = """\
Measure log-probs and the first training step of a GPT without, with, and again without the warmup. Every run has
new processes; compile caches are empty, or those of an earlier run. Prints a table and writes every number and
every run to a JSON file, after each run. What the fields mean is in docs/how-to/run-gpu-tests.md."""
EPILOG = """\
A run that fails or hangs is noted with its error, and costs no other run. With --device cpu the model is tiny, only
Megatron's own layers are measured, and nothing is compiled unless --compile is given. Exit status: 0, or 1 if a
run failed or results with the warmup differ from those without, or 2 for arguments that cannot be."""
PROBES = ("spans", "operators", "functions")
IMPORTS_AHEAD_CORES = 8
DIFFERENCES_SHOWN = 12


def add_to(commands: Any) -> None:
    """Add the parser of this command to *commands*."""
    parser = commands.add_parser(
        "bench",
        help="measure first steps without and with the warmup",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda",
        help="NCCL (default; with few GPUs, ranks share them), or gloo",
    )
    add("--pp", type=at_least(2), metavar="N", help="pipeline stages (default: what --tp, --ep leave of the GPUs)")
    add("--vp", type=at_least(2), metavar="N", help="model chunks per stage (default: no virtual stages)")
    add("--tp", type=at_least(1), default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
    add("--ep", type=at_least(1), default=1, metavar="N", help="expert-parallel ranks; above 1: experts (default: 1)")
    add("--only", default="", metavar="NAMES", help="cases, separated by commas (default: all)")
    add("--repeat", type=at_least(1), default=3, metavar="N", help="runs with the warmup per case (default: 3)")
    add("--steady", type=at_least(2), default=5, metavar="N", help="steps after the first (default: 5)")
    add("--caches", choices=("per-rank", "shared"), default="per-rank", help="compile caches of the ranks")
    add("--cold-only", action="store_true", help="measure with empty compile caches only")
    add("--compile", action="store_true", help="on a CPU: compile Megatron's fused functions for real")
    add("--profile", action="store_true", help="instead: say what the first real calls pay for that steady ones do not")
    add("--budget-s", type=seconds, default=86400.0, metavar="SECONDS", help="begin no run after that long")
    add("--limit-s", type=seconds, default=180.0, metavar="SECONDS", help="a run that takes longer has hung")
    add("--out", type=Path, default=Path("bench.json"), metavar="FILE", help="the results (default: bench.json)")
    parser.set_defaults(run=lambda arguments: run(arguments, parser.error))


def run(arguments: argparse.Namespace, refuse: Callable[[str], Any]) -> int:
    """Measure.

    Args:
        arguments: What `add_to` describes.
        refuse: Called with what is wrong with the arguments; does not return.

    Returns:
        The exit status.
    """
    began = time.monotonic()
    ranks = _spread(arguments, refuse)
    chosen = _chosen(arguments, refuse)
    document: dict[str, Any] = {
        "command": " ".join(["python -m pp_free_warmup", *sys.argv[1:]]),
        **mark(arguments.device, ranks),
        "hardware": _hardware(),
        "versions": _versions(),
        "models": {case.name: vars(case.layout) for case in chosen},
        "cases": [],
        "runs": [],
    }
    with tempfile.TemporaryDirectory(prefix="pp-free-warmup-bench-") as root:
        for result in _results(arguments, chosen, ranks, Path(root), began + arguments.budget_s):
            print(_line(result), flush=True)
            _add(document, result, arguments)
    return _show(document, arguments)


def _results(
    arguments: argparse.Namespace, chosen: list[Case], ranks: int, root: Path, deadline: float
) -> Iterator[dict[str, Any]]:
    """Make the runs."""
    from pp_free_warmup._cli import _bench_runs as runs

    conditions = runs.Conditions(
        device=arguments.device,
        ranks=ranks,
        shared=arguments.caches == "shared",
        compiled=arguments.compile,
        steady=arguments.steady,
        limit_s=arguments.limit_s,
        ahead=2 if cores_usable() >= IMPORTS_AHEAD_CORES * ranks else 1,
        root=root,
    )
    turns = (
        runs.probes(chosen, PROBES)
        if arguments.profile
        else runs.turns(chosen, arguments.repeat, not arguments.cold_only)
    )
    yield from runs.run_all(turns, conditions, deadline)


def _add(document: dict[str, Any], result: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Add one run to the document, and write all of it."""
    from pp_free_warmup._cli._bench_results import summarize

    document["runs"].append(result)
    document["cases"] = summarize(document["runs"], arguments.caches == "shared")
    if arguments.profile:
        document["longer_in_the_first_call"] = _longer(document["runs"])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    written = {**document, "runs": [_without_digests(run) for run in document["runs"]]}
    arguments.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _without_digests(run: dict[str, Any]) -> dict[str, Any]:
    """Leave out what was compared: thousands of digests that nobody reads."""
    ranks = [{**rank, "made": len(rank["made"])} for rank in run.get("ranks", ())]
    return {**run, "ranks": ranks} if ranks else run


def _longer(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return by case, probe, part and rank what the first real calls pay for and steady ones do not."""
    found: dict[str, Any] = {}
    for run in runs:
        for rank in run.get("ranks", ()):
            for part, rows in rank["probe"].items():
                place = found.setdefault(run["case"], {}).setdefault(run["probe"], {}).setdefault(part, {})
                place[f"rank {rank['rank']}"] = rows
    return found


def _show(document: dict[str, Any], arguments: argparse.Namespace) -> int:
    from pp_free_warmup._cli._bench_results import table

    print(*_differences(document) if arguments.profile else [table(document["cases"])], sep="\n")
    print(f"results: {arguments.out}")
    failed = any("error" in run for run in document["runs"])
    return int(failed or any(case["identical"] is not True for case in document["cases"]))


def _differences(document: dict[str, Any]) -> Iterator[str]:
    """Yield one line per difference between a first and a steady call, of the rank that saw the most."""
    for case, probes in document["longer_in_the_first_call"].items():
        for probe, parts in probes.items():
            for part, ranks in parts.items():
                rank, rows = max(ranks.items(), key=lambda item: sum(row["first_s"] for row in item[1]))
                for row in rows[:DIFFERENCES_SHOWN]:
                    yield f"{case}, {probe}, {part}, {rank}: {row['first_s']} s, {row['steady_s']} s: {row['name']}"


def _line(result: dict[str, Any]) -> str:
    """Say in one line how a run went."""
    from pp_free_warmup._cli._bench_results import first_s

    what = f"{result['case']}, {result['caches']} caches, {'with' if result['warmed'] else 'without'}"
    what += f" #{result['number']}{', ' + result['probe'] if 'probe' in result else ''}"
    told = f"FAILED: {_names_of_errors(result['error'])}" if "error" in result else f"first {first_s(result):.2f} s"
    return f"{what}: {told} (wall {result['wall_s']:.1f} s)"


def _names_of_errors(text: str) -> str:
    """Pick from the ranks' tracebacks the lines that name an error, or a rank that died or hangs."""
    named = re.findall(
        r"^(?:[\w.]*(?:Error|Failed|Exception|Silent)\b.*|.*process of this rank died.*|Rank \d+: .*)",
        text,
        re.MULTILINE,
    )
    return "; ".join(named[:8]) or text[-200:]


def _spread(arguments: argparse.Namespace, refuse: Callable[[str], Any]) -> int:
    """Fill in the number of stages; return the number of ranks."""
    inner = arguments.tp * arguments.ep
    if arguments.device == "cpu":
        arguments.pp = arguments.pp or 2
        return int(arguments.pp * inner)
    import torch

    gpus = torch.cuda.device_count()
    arguments.pp = arguments.pp or max(2, gpus // inner)
    spread = Spread(arguments.pp * inner, gpus)
    if spread.obstacle():
        refuse(f"--device cuda with {arguments.pp} stages of {inner} ranks: {spread.obstacle()}")
    if spread.line():
        print(spread.line(), file=sys.stderr)
    return spread.ranks


def _chosen(arguments: argparse.Namespace, refuse: Callable[[str], Any]) -> list[Case]:
    """Return the cases that are asked for and that this machine can run."""
    from pp_free_warmup._cli._bench_cases import cases

    all_ = cases(arguments.device, pp=arguments.pp, vp=arguments.vp, tp=arguments.tp, ep=arguments.ep)
    has_te = arguments.device == "cuda" and installed("transformer-engine") is not None
    known = [case for case in all_ if has_te or not case.needs_te]
    names = [name for name in arguments.only.split(",") if name]
    unknown = [name for name in names if not any(case.name.startswith(name) for case in known)]
    if unknown:
        refuse(f"--only {','.join(unknown)}: can be {', '.join(case.name for case in known)}")
    return [case for case in known if not names or any(case.name.startswith(name) for name in names)]


def _versions() -> dict[str, str | None]:
    """Say what was measured with."""
    import torch

    found = {"python": sys.version.split()[0], **{name: installed(name) for name in (*DISTRIBUTIONS, "triton")}}
    found["megatron-core"] = imported_version()
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _hardware() -> dict[str, Any]:
    """Say what was measured on, asking the driver's own tool: this process takes no memory on a GPU."""
    gpus: list[str] = []
    if shutil.which("nvidia-smi"):
        told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout  # noqa: S607
        gpus = [line.split(" (UUID")[0] for line in told.splitlines()]
    return {"gpus": gpus, "cores": os.cpu_count(), "cores_usable": cores_usable()}
