"""The commands, one file each.

A command's module has ``add_to(commands)``, which adds its parser and names the
function that runs it. Only that function imports torch and Megatron, so that
``--help`` is quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pp_free_warmup import __version__
from pp_free_warmup._cli import bench, demo, doctor, run

COMMANDS = (demo, run, bench, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that *argv* names.

    Args:
        argv: The arguments without the program's name; None takes the process's own.

    Returns:
        The exit status: 0 for success, 1 for a finding or a failure, 2 for arguments that cannot be.
    """
    parser = argparse.ArgumentParser(
        prog="pp-free-warmup",
        description="Let every pipeline stage of a Megatron model pay its first-step cost at the same time.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_to(commands)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))
