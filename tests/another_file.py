"""Another file of a trainer's, for what is counted two calls away."""

from __future__ import annotations

import random
from typing import Any

from further_file import count_further

SEEN: list[int] = []
STATE: dict[str, list[int]] = {"lengths": []}


class Base:
    """A trainer's base class, in a file of its own."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, *_: object) -> None:
        """Count where the class is from."""
        SEEN.append(1)


class Meter:
    """A loss of a trainer's library: it counts and draws."""

    def __init__(self) -> None:
        self.calls = [0]
        self.noise = random.Random(3)

    def weigh(self, loss: Any, output: Any) -> Any:
        """Scale a loss by what this has counted and drawn."""
        self.calls.append(1)
        total, tokens, told = loss(output)
        return total * (len(self.calls) / 100 + self.noise.random()), tokens, told


METER = Meter()


def count_here(*_: object) -> None:
    """Count in this file."""
    SEEN.append(1)


def count_in_state(*_: object) -> None:
    """Count in a dict of lists."""
    STATE["lengths"].append(1)


def count_there(*_: object) -> None:
    """Leave the counting to yet another file."""
    count_further()
