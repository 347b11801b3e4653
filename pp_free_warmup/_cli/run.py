"""``run``: run a training script with a warmup block around it, no line of the script changed."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pp_free_warmup._cli._values import seconds

if TYPE_CHECKING:
    from pp_free_warmup._warmup import PipelineWarmup

DESCRIPTION = """\
Run a training script as ``python SCRIPT`` would, inside a pipeline_warmup block: under a launcher,
torchrun --nproc-per-node 8 -m pp_free_warmup run pretrain_gpt.py --tensor-model-parallel-size 2 ..."""
EPILOG = """\
Every option is also read from the environment, as PP_FREE_WARMUP_CHANNELS, PP_FREE_WARMUP_TIMEOUT and so on; a flag
wins. PP_FREE_WARMUP=0 switches the warmup off. At the end global rank 0 prints the reports. Processes that the
script starts itself (a Ray actor, a spawned worker) are not reached: wrap their function with warm_first_call. The
exit status is the script's, or 2 for arguments that cannot be."""


class Option(NamedTuple):
    """An option of `pipeline_warmup` that has a text form.

    Attributes:
        name: As the keyword argument is called.
        read: Makes the value of the text; raises `argparse.ArgumentTypeError` where it cannot.
        metavar: Stands for the value in the help.
        help: What it does.
    """

    name: str
    read: Callable[[str], Any]
    metavar: str
    help: str

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The option in the environment."""
        return f"PP_FREE_WARMUP_{self.name.upper()}"


def one_of(*values: str) -> Callable[[str], str | None]:
    """Return a reader of one of *values*; ``none`` reads as None."""

    def read(text: str) -> str | None:
        if text not in values:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(values)}")
        return None if text == "none" else text

    return read


OPTIONS = (
    Option("channels", one_of("pipeline", "all", "none"), "WHICH", "pipeline (default), all (reductions too) or none"),
    Option("timeout", seconds, "SECONDS", "how long a rank may be silent (default: the pipeline group's timeout)"),
    Option("on_unsupported", one_of("skip", "raise"), "HOW", "where it cannot warm: skip (default) or raise"),
    Option("on_failure", one_of("continue", "raise"), "HOW", "where the pass fails: continue (default) or raise"),
    Option("report_to", Path, "FILE", "where global rank 0 writes the last report as JSON"),
)


def add_to(commands: Any) -> None:
    """Add the parser of this command to *commands*."""
    parser = commands.add_parser(
        "run",
        help="run a training script with the warmup, unchanged",
        description=DESCRIPTION,
        epilog=EPILOG,
        usage="%(prog)s [options] (SCRIPT | -m MODULE) [ARGUMENTS ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option in OPTIONS:
        named = {"type": option.read, "metavar": option.metavar, "help": option.help}
        parser.add_argument(option.flag, default=argparse.SUPPRESS, **named)
    parser.add_argument("--verify", action="store_true", help="compare all reachable state; for a trial, it is slow")
    rest = argparse.REMAINDER
    parser.add_argument("-m", nargs=rest, dest="module", metavar="MODULE", help="run a module, as python -m does")
    parser.add_argument("script", nargs=rest, metavar="SCRIPT", help="the script, and what it is called with")
    parser.set_defaults(run=lambda arguments: run(arguments, parser.error))


def run(arguments: argparse.Namespace, refuse: Callable[[str], Any]) -> int:
    """Run the script inside a block.

    Args:
        arguments: What `add_to` describes.
        refuse: Called with what is wrong with the arguments; does not return.

    Returns:
        0; a script that exits otherwise, or raises, does so through here.
    """
    words = arguments.module or arguments.script
    if not words:
        refuse("name a script, or a module after -m")
    if not arguments.module and not Path(words[0]).is_file():
        refuse(f"there is no script {words[0]}")
    keywords = _keywords(arguments, refuse)
    from pp_free_warmup import pipeline_warmup

    block = pipeline_warmup(**keywords)
    try:
        with block:
            _execute(words, is_module=bool(arguments.module))
    finally:
        _tell(block)
    return 0


def _keywords(arguments: argparse.Namespace, refuse: Callable[[str], Any]) -> dict[str, Any]:
    """Return the options that were given, by flag or in the environment."""
    chosen = {"verify": True} if arguments.verify else {}
    for option in OPTIONS:
        text = os.environ.get(option.variable)
        if hasattr(arguments, option.name):
            chosen[option.name] = getattr(arguments, option.name)
        elif text:
            try:
                chosen[option.name] = option.read(text)
            except argparse.ArgumentTypeError as error:
                refuse(f"{option.variable}: {error}")
    return chosen


def _execute(words: list[str], *, is_module: bool) -> None:
    """Run a script or module as ``__main__``, with its own arguments and import path."""
    sys.argv = list(words)
    sys.path[0] = str(Path.cwd() if is_module else Path(words[0]).resolve().parent)
    if is_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def _tell(block: PipelineWarmup) -> None:
    """Print every report, on one rank."""
    if os.environ.get("RANK", "0") == "0":
        for report in block.reports:
            print(report, flush=True)
