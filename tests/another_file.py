"""Another file of a trainer's, for what is counted two calls away."""

from __future__ import annotations

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


def count_here(*_: object) -> None:
    """Count in this file."""
    SEEN.append(1)


def count_in_state(*_: object) -> None:
    """Count in a dict of lists."""
    STATE["lengths"].append(1)


def count_there(*_: object) -> None:
    """Leave the counting to yet another file."""
    count_further()
