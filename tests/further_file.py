"""Yet another file of a trainer's, which only `another_file` names."""

from __future__ import annotations

CALLS = {"all": 0}


def count_further() -> None:
    """Count in this file."""
    CALLS["all"] += 1
