"""The command-line flag for Megatron-LM's own argument parser."""

from __future__ import annotations

import argparse


def add_warmup_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--enable-pp-free-warmup`` to a parser.

    Give it to Megatron as its extra arguments provider: `parse_and_validate_args` from 0.18,
    `pretrain` before.

    Args:
        parser: The parser to add to; a group of its own is made.

    Returns:
        The same parser, as Megatron's providers must.

    Example:
        >>> import argparse
        >>> parser = add_warmup_args(argparse.ArgumentParser())
        >>> parser.parse_args(["--enable-pp-free-warmup"]).enable_pp_free_warmup
        True
    """
    group = parser.add_argument_group("pp_free_warmup")
    group.add_argument(
        "--enable-pp-free-warmup",
        action="store_true",
        help="Compile every pipeline stage at the same time before the first step, leaving no trace.",
    )
    return parser
