"""How many trials went wrong, and in which way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


class Counts:
    """Counts trials, and those with a hang, a leak, or an error that names nobody."""

    def __init__(self) -> None:
        self.trials = 0
        self.wrong: Counter[str] = Counter()

    def add(self, verdict: Mapping[str, Sequence[str]]) -> None:
        """Count one trial."""
        self.trials += 1
        self.wrong.update(kind for kind, found in verdict.items() if found)

    def line(self) -> str:
        """Return the one line that says it all."""
        return f"{self.trials} trials, " + ", ".join(
            f"{self.wrong[kind]} {kind}" for kind in ("hangs", "leaks", "unnamed")
        )


COUNTS = Counts()
