"""``demo``: train a small Megatron GPT without and with the warmup, and compare seconds and bits."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pp_free_warmup._cli._plan import Plan
from pp_free_warmup._cli._progress import Progress
from pp_free_warmup._cli._values import at_least, seconds
from pp_free_warmup.testing._shared_gpu import spread

if TYPE_CHECKING:
    from pp_free_warmup._cli._results import Pair, Result

PICTURES = (".png", ".svg")

DESCRIPTION = """\
Train a small, real Megatron GPT (its schedule, DDP and distributed optimizer) twice: without and with the warmup.
Each run has new processes, one per stage, and empty compile caches. Prints the first step of both (the warmup
counts as part of it), their ratio, the steady step, and whether every loss, gradient norm, gradient, activation
and parameter of every step is equal to the bit."""

EPILOG = """\
Real compilation is Inductor's, of what Megatron marks for fusion, with one compile thread per rank (as with
TORCHINDUCTOR_COMPILE_THREADS=1), so that stages do not take each other's cores; with more stages than cores they
do. Exit status: 0, or 1 if a rank failed, if the warmup did not run or if anything differs, or 2 for arguments that
cannot be."""


def add_to(commands: Any) -> None:
    """Add the parser of this command to *commands*."""
    parser = commands.add_parser(
        "demo",
        help="train a small Megatron GPT without and with the warmup, and compare",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--pp", type=at_least(2), default=2, metavar="N", help="pipeline stages, one process each (default: 2)")
    add("--vpp", type=at_least(2), metavar="N", help="model chunks per stage (default: no virtual stages)")
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="gloo on the CPU (default), or NCCL; with few GPUs, stages share them",
    )
    add(
        "--simulate-jit",
        type=seconds,
        metavar="SECONDS",
        help="do not compile: let the first forward and the first backward of each model chunk sleep that long",
    )
    add(
        "--caches",
        choices=("per-rank", "shared"),
        default="per-rank",
        help="one compile cache per rank, as on separate hosts, or one for all (default: per-rank)",
    )
    add("--steps", type=at_least(3), default=20, metavar="N", help="training steps per run (default: 20)")
    add("--repeat", type=at_least(1), default=1, metavar="N", help="pairs of runs; numbers are medians (default: 1)")
    add("--picture", type=Path, metavar="FILE", help="draw the first step, every stage, as .svg or .png")
    add("--json", action="store_true", help="print the result as one JSON object, on the last line")
    add("--timeout", type=seconds, default=3600.0, metavar="SECONDS", help="give up after that long (default: 3600)")
    parser.set_defaults(run=lambda arguments: run(arguments, parser.error))


def run(arguments: argparse.Namespace, refuse: Callable[[str], Any]) -> int:
    """Run the demo.

    Args:
        arguments: What `add_to` describes.
        refuse: Called with what is wrong with the arguments; does not return.

    Returns:
        The exit status.
    """
    _check_picture(arguments.picture, refuse)
    plan = Plan(
        pp=arguments.pp,
        vpp=arguments.vpp,
        device=arguments.device,
        simulate_jit=arguments.simulate_jit,
        caches=arguments.caches,
        steps=arguments.steps,
    )
    progress = Progress(Console(stderr=True), arguments.timeout)
    progress.say(plan.title())
    _check_device(plan, refuse, progress)
    with _terminated_as_interrupted():
        try:
            return _compare(plan, arguments, progress)
        except KeyboardInterrupt:
            progress.say("interrupted; the ranks are ended")
            return 128 + signal.SIGINT


def _compare(plan: Plan, arguments: argparse.Namespace, progress: Progress) -> int:
    """Make the runs, show what they found, and return the exit status."""
    from pp_free_warmup._cli._results import Result
    from pp_free_warmup._cli._runs import RunFailed
    from pp_free_warmup._cli._table import show

    try:
        result = Result(plan, [_pair(plan, number, arguments.repeat, progress) for number in range(arguments.repeat)])
    except RunFailed as failure:
        print(f"pp-free-warmup demo: {failure}", file=sys.stderr)
        return 1
    show(result, Console())
    if arguments.picture is not None:
        _draw(result, arguments.picture, progress)
    if arguments.json:
        print(json.dumps(result.to_dict()))
    return int(bool(result.differences))


def _pair(plan: Plan, number: int, of: int, progress: Progress) -> Pair:
    """Run once without the warmup and once with it."""
    from pp_free_warmup._cli._results import Pair
    from pp_free_warmup._cli._runs import run_fresh

    progress.heading = f"{number + 1} of {of}, " if of > 1 else ""
    runs = []
    for warmed in (False, True):
        run_ = run_fresh(plan, warmed=warmed, timeout=progress.left, progress=progress)
        progress.say(f"{progress.heading}first step {'with' if warmed else 'without'}: {run_.first_step_s:.2f} s")
        runs.append(run_)
    return Pair(*runs)


def _draw(result: Result, path: Path, progress: Progress) -> None:
    """Draw the picture into *path*."""
    from pp_free_warmup._cli._picture import draw

    progress.say("draws the picture")
    draw(result.typical, result.plan, path)
    print(f"picture: {path}")


def _check_picture(path: Path | None, refuse: Callable[[str], Any]) -> None:
    """Refuse before the runs what could not be drawn after them."""
    if path is None:
        return
    if path.suffix not in PICTURES:
        refuse(f"--picture {path}: the name must end in {' or '.join(PICTURES)}")
    if not path.parent.is_dir():
        refuse(f"--picture {path}: there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        refuse("--picture needs matplotlib: pip install 'pp-free-warmup[picture]'")


def _check_device(plan: Plan, refuse: Callable[[str], Any], progress: Progress) -> None:
    """Refuse GPUs that are not there or cannot be shared, and say so where stages share one."""
    if plan.device == "cpu":
        return
    stages = spread(plan.pp)
    if stages.obstacle():
        refuse(f"--device cuda --pp {plan.pp}: {stages.obstacle()}")
    if stages.line():
        progress.say(stages.line())


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let a request to end (SIGTERM) unwind like an interrupt, so that ranks are ended and folders removed."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
