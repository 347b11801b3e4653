"""Compare training without, with, and again without the warmup, to the bit: ``python -m tests.gpu.parity``.

One set of processes serves many configurations; process groups and Megatron's parallel state are
made anew for each run. A configuration that fails or hangs costs its processes and its own result,
no other. Results are written to JSON after each configuration.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pp_free_warmup.testing._rank_pool import RankPool, RanksFailed, run_on_ranks
from pp_free_warmup.testing._shared_gpu import mark, rank_environment, spread
from tests.gpu.comparison import verdict
from tests.gpu.configurations import Configuration, configurations

# Transformer Engine repeats its own results only so; the others are what Megatron asks for, and one
# compiler thread per process, since many processes compile at once.
ENVIRONMENT = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
RUNS = (("without", False), ("with", True), ("without again", False))
GOOD = ("identical", "noticed", "not run")


def reason_not_to_run(configuration: Configuration, device: str) -> str:
    """Say what this machine lacks for the configuration; empty if nothing."""
    if device == "cpu" and configuration.needs_gpu:
        return "needs a GPU"
    if configuration.needs_te and importlib.util.find_spec("transformer_engine") is None:
        return "needs Transformer Engine"
    return ""


def compare(
    configuration: Configuration,
    world: int,
    *,
    device: str = "cuda",
    steps: int = 20,
    limit_s: float = 120.0,
    pool: RankPool | None = None,
) -> dict[str, Any]:
    """Run one configuration without, with and without the warmup, and say how they compare.

    Args:
        configuration: What to train.
        world: Processes.
        device: ``"cuda"`` or ``"cpu"``.
        steps: Training steps of each run.
        limit_s: Seconds after which a run counts as hung.
        pool: The processes; None takes the shared ones.

    Returns:
        ``name``, ``runs`` and what `verdict` returns; verdict ``failed`` comes with ``error``.
    """
    from tests.gpu.run import record

    result: dict[str, Any] = {"name": configuration.name, "steps": steps, "runs": {}}
    ended = []
    for name, warm in RUNS:
        began = time.perf_counter()
        options = {"timeout": limit_s, "device": device, "pool": pool}
        try:
            ended.append(run_on_ranks(record, world, configuration, warm=warm, steps=steps, **options))
        except RanksFailed as failure:
            return {**result, "verdict": "failed", "where": name, "error": str(failure)}
        seconds = [rank["seconds"] for rank in ended[-1]]
        result["runs"][name] = {"wall_s": round(time.perf_counter() - began, 2), "ranks": seconds}
    return {**result, **verdict(configuration, *ended)}


class Comparisons:
    """All chosen configurations, in lanes that each have processes of their own.

    Args:
        arguments: The command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.chosen = chosen(arguments)
        self.document: dict[str, Any] = {
            "command": " ".join(sys.argv),
            **mark(arguments.device, arguments.ranks),
            "machine": describe_machine(arguments),
        }
        self._results: dict[str, dict[str, Any]] = {}
        self._waiting: queue.SimpleQueue[Configuration] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Compare them all within the budget; return the document that was written."""
        for configuration in self.chosen:
            self._waiting.put(configuration)
        with concurrent.futures.ThreadPoolExecutor(self.arguments.lanes) as lanes:
            for ended in [lanes.submit(self._lane) for _ in range(self.arguments.lanes)]:
                ended.result()
        return self.document

    def _lane(self) -> None:
        """Take one configuration after the other, with one set of processes."""
        pool = RankPool(rank_environment(self.arguments.device, self.arguments.ranks))
        try:
            while True:
                self._finish(self._one(self._waiting.get_nowait(), pool))
        except queue.Empty:
            return
        finally:
            pool.stop()

    def _one(self, configuration: Configuration, pool: RankPool) -> dict[str, Any]:
        arguments, began = self.arguments, time.monotonic()
        lacking = reason_not_to_run(configuration, arguments.device)
        if not lacking and began - self._began > arguments.budget_s:
            lacking = "no time left"
        if lacking:
            return {"name": configuration.name, "verdict": "not run", "error": lacking}
        options = {"device": arguments.device, "steps": arguments.steps, "limit_s": arguments.limit_s}
        return {**compare(configuration, arguments.ranks, pool=pool, **options), "wall_s": time.monotonic() - began}

    def _finish(self, result: dict[str, Any]) -> None:
        """Print one line, and write all results so far, in the order of the configurations."""
        with self._lock:
            print(line_of(result), flush=True)
            self._results[result["name"]] = result
            names = [configuration.name for configuration in self.chosen]
            self.document["results"] = [self._results[name] for name in names if name in self._results]
            self.arguments.out.parent.mkdir(parents=True, exist_ok=True)
            self.arguments.out.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")


def line_of(result: dict[str, Any]) -> str:
    """Return a result in one line; of an error its end, which names it."""
    parts = [result.get("error", "")[-1500:], *result.get("apart", [])[:3], *result.get("differences", [])[:4]]
    compared = f", {result['compared']} compared" if "compared" in result else ""
    seconds = f"({result.get('wall_s', 0.0):.1f} s{compared})"
    return f"{result['verdict']:>15}  {result['name']}  {seconds}  {'; '.join(filter(None, parts))}".rstrip()


def describe_machine(arguments: argparse.Namespace) -> dict[str, Any]:
    """Say what the results were measured on and with."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
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
    only = [name for name in arguments.only.split(",") if name] or list(known)
    left_out = [name for name in arguments.skip.split(",") if name]
    unknown = [name for name in itertools.chain(only, left_out) if name not in known]
    if unknown:
        raise SystemExit(f"unknown configuration {unknown}; known: {', '.join(known)}")
    return [known[name] for name in only if name not in left_out]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.parity", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("parity.json"), help="where the results go")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=0, help="processes; 0: one per GPU, at least 2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--skip", default="", help="names, separated by commas")
    parser.add_argument("--lanes", type=int, default=1, help="sets of processes that work at the same time")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds for one run, then it counts as hung")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="seconds after which none is begun")
    arguments = parser.parse_args(words)
    arguments.ranks = arguments.ranks or (max(2, torch.cuda.device_count()) if arguments.device == "cuda" else 2)
    return arguments


def set_environment() -> None:
    """Set what processes that are started from now on need, where the caller has not chosen."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _check_gpus(ranks: int) -> None:
    """Say that ranks share GPUs, or end where they cannot."""
    wanted = spread(ranks)
    if wanted.obstacle():
        raise SystemExit(wanted.obstacle())
    if wanted.line():
        print(wanted.line(), flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Compare, print one line per configuration, and return 0 if nothing is wrong."""
    set_environment()
    arguments = parse(words)
    if arguments.device == "cuda":
        _check_gpus(arguments.ranks)
    document = Comparisons(arguments).run()
    verdicts = [result["verdict"] for result in document.get("results", [])]
    print({verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)})
    return 0 if all(verdict in GOOD for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
