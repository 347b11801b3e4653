"""Compare training without, with, and again without the warmup, to the bit: ``python -m tests.gpu.parity``.

One set of processes, one per GPU, serves all configurations; process groups and Megatron's parallel
state are made anew for each run. A configuration that fails or hangs costs its processes and its
own result, no other. Results are written to JSON after each configuration.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pp_free_warmup.testing._rank_pool import RanksFailed, run_on_ranks
from tests.gpu.configurations import Configuration, configurations
from tests.gpu.run import record

# Transformer Engine repeats its own results only so; the rest is what Megatron asks for.
ENVIRONMENT = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
}
SHOWN = 12
GOOD = ("identical", "noticed", "not run")
Ranks = list[dict[str, Any]]


def set_environment() -> None:
    """Ask for deterministic kernels, unless the caller already chose."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def reason_not_to_run(configuration: Configuration, device: str) -> str:
    """Say what this machine lacks for the configuration; empty if nothing."""
    if device == "cpu" and configuration.needs_gpu:
        return "needs a GPU"
    if configuration.needs_te and importlib.util.find_spec("transformer_engine") is None:
        return "needs Transformer Engine"
    return ""


def compare(
    configuration: Configuration, world: int, *, device: str = "cuda", steps: int = 20, limit_s: float = 90.0
) -> dict[str, Any]:
    """Run one configuration without, with and without the warmup, and say how they compare.

    Returns:
        ``name``, ``verdict`` (identical, differs, not comparable, not warmed, failed; for a control
        noticed or blind), how much was compared, and what differs first on each rank.
    """
    result: dict[str, Any] = {"name": configuration.name, "steps": steps, "runs": {}}
    runs: dict[str, Ranks] = {}
    for name, warm in (("without", False), ("with", True), ("without again", False)):
        began = time.perf_counter()
        try:
            runs[name] = run_on_ranks(
                record, world, configuration, warm=warm, steps=steps, timeout=limit_s, device=device
            )
        except RanksFailed as failure:
            return {**result, "verdict": "failed", "where": name, "error": str(failure)}
        result["runs"][name] = {
            "wall_s": round(time.perf_counter() - began, 2),
            "seconds": [rank["seconds"] for rank in runs[name]],
        }
    return {**result, **_verdict(configuration, runs)}


def _verdict(configuration: Configuration, runs: dict[str, Ranks]) -> dict[str, Any]:
    first, warmed, second = runs.values()
    apart, changed = _differences(first, second), _differences(first, warmed)
    told: dict[str, Any] = {
        "compared": sum(len(rank["kept"]) for rank in first),
        "losses": [loss for rank in first for loss in rank["losses"]][:: max(1, configuration.layout.num_microbatches)],
        "warmups": [rank["warmups"] for rank in warmed],
    }
    kinds = {"training", *(["forward-only"] if configuration.forward_only_first else [])}
    done = [{report["kind"] for report in rank["warmups"] if report["outcome"] == "warmed"} for rank in warmed]
    if any(kinds - each for each in done):
        return {**told, "verdict": "not warmed"}
    if apart:
        return {**told, "verdict": "not comparable", "differences": apart, "with_warmup": changed}
    if configuration.without:
        return {**told, "verdict": "noticed" if changed else "blind", "differences": changed}
    return {**told, "verdict": "differs" if changed else "identical", "differences": changed}


def _differences(one: Ranks, other: Ranks) -> list[str]:
    """Name what differs, rank by rank, in the order in which it happened."""
    found = []
    for rank, (left, right) in enumerate(zip(one, other, strict=True)):
        names = dict.fromkeys([*left["kept"], *right["kept"]])
        unequal = [name for name in names if left["kept"].get(name) != right["kept"].get(name)]
        found += [f"rank {rank}: {name}" for name in unequal[:SHOWN]]
        if len(unequal) > SHOWN:
            found.append(f"rank {rank}: and {len(unequal) - SHOWN} of {len(names)} more")
    return found


def run_all(arguments: argparse.Namespace, told: Callable[[str], None] = print) -> dict[str, Any]:
    """Compare every chosen configuration within the budget; write the results as they come."""
    began = time.monotonic()
    results: list[dict[str, Any]] = []
    document = {"command": " ".join(sys.argv), "machine": describe_machine(arguments), "results": results}
    for configuration in chosen(arguments):
        lacking = reason_not_to_run(configuration, arguments.device)
        if not lacking and time.monotonic() - began > arguments.budget_s:
            lacking = "no time left"
        started = time.perf_counter()
        result = {"name": configuration.name, "verdict": "not run", "error": lacking}
        if not lacking:
            options = {"device": arguments.device, "steps": arguments.steps, "limit_s": arguments.limit_s}
            result = compare(configuration, arguments.ranks, **options)
        result["wall_s"] = round(time.perf_counter() - started, 2)
        results.append(result)
        told(_line(result))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


def _line(result: dict[str, Any]) -> str:
    detail = result.get("error") or "; ".join(result.get("differences", [])[:4])
    compared = f", {result['compared']} digests" if "compared" in result else ""
    return f"{result['verdict']:>15}  {result['name']}  ({result['wall_s']:.1f} s{compared})  {detail[-1500:]}".rstrip()


def describe_machine(arguments: argparse.Namespace) -> dict[str, Any]:
    """Say what the results were measured on and with."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    for name in ("megatron-core", "transformer-engine", "triton"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    environment = {name: os.environ.get(name) for name in ENVIRONMENT}
    return {"versions": versions, "gpus": _gpus(), "ranks": arguments.ranks, "environment": environment}


def _gpus() -> list[str]:
    """Ask the driver's own tool for the names, so that this process takes no memory on a GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return [line.split(" (UUID")[0] for line in told.splitlines()]


def chosen(arguments: argparse.Namespace) -> list[Configuration]:
    """Return the configurations that the command line asks for.

    Raises:
        SystemExit: A name is unknown.
    """
    known = {configuration.name: configuration for configuration in configurations(arguments.ranks, arguments.device)}
    names = [name for name in (arguments.only or "").split(",") if name] or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"unknown configuration {unknown}; known: {', '.join(known)}")
    return [known[name] for name in names]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.parity", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("parity.json"), help="where the results go")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=0, help="processes; 0: one per GPU (on CPU: 2)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--limit-s", type=float, default=90.0, help="seconds for one run, then it counts as hung")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="seconds after which none is begun")
    arguments = parser.parse_args(words)
    arguments.ranks = arguments.ranks or (torch.cuda.device_count() if arguments.device == "cuda" else 2)
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Compare, print one line per configuration, and return 0 if nothing is wrong."""
    set_environment()
    arguments = parse(words)
    document = run_all(arguments)
    verdicts = [result["verdict"] for result in document["results"]]
    print({verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)})
    return 0 if all(verdict in GOOD for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
