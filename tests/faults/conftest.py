"""The last line of a run of the fault harness."""

from __future__ import annotations

from verdicts import COUNTS


def pytest_unconfigure(config: object) -> None:
    """Print the counts after everything else."""
    del config
    if COUNTS.trials:
        print(COUNTS.line())
