"""Readers of the numbers that commands take."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from *least* on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return number


def seconds(text: str) -> float:
    """Read a number of seconds above zero."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return found
