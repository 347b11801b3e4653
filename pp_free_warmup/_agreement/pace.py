"""How often to ask, so that a quick vote is quick and a slow one costs nobody anything."""

from __future__ import annotations

import time
from collections.abc import Iterator

SHORTEST_PAUSE = 0.001
GROWTH = 1.5
EAGER_SECONDS = 10.0


class Pace:
    """Seconds between two questions to the store, and between two signs of life.

    Both grow with the number of ranks, because all of them ask the one process that serves the store:
    together they stay at about ten thousand questions a second (docs/explanation/scale.md).

    Args:
        timeout: Seconds without a sign of life after which a rank counts as lost.
        ranks: How many ranks take part in the call.

    Attributes:
        sign: Seconds between two signs of life, and between two looks at others'.
        news: The same for a sign that tells a new phase: all ranks change phase at about the same time.
    """

    def __init__(self, timeout: float, ranks: int) -> None:
        self.sign = min(timeout / 8, max(1.0, ranks / 2000))
        self.news = min(self.sign, ranks / 20_000)
        self._eager = max(0.1, ranks / 10_000)
        self._patient = max(1.0, ranks / 3000)

    def pauses(self) -> Iterator[float]:
        """Yield how long to sleep after each question: short at first, then longer."""
        began, pause = time.monotonic(), SHORTEST_PAUSE
        while True:
            yield pause
            eager = time.monotonic() - began < EAGER_SECONDS
            pause = min(pause * GROWTH, self._eager if eager else self._patient)

    @property
    def linger(self) -> float:
        """Seconds within which every rank that lives has looked at the store again."""
        return 1.2 * max(self.sign, self._patient)
