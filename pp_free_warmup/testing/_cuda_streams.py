"""Stand-ins for CUDA streams and events where everything runs in order on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any


class Event:
    """A moment of one in-order stream: it is over as soon as it is recorded."""

    def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
        self._recorded = 0.0

    def record(self, _stream: Any = None) -> None:
        """Note the time."""
        self._recorded = perf_counter()

    def wait(self, _stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: all work before the event is done."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to *end*."""
        return (end._recorded - self._recorded) * 1e3


class Stream:
    """A queue of work that is always empty, since work is done when it is asked for."""

    cuda_stream = 0

    def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority."""
        return (0, -1)

    def wait_stream(self, _other: Any) -> None:
        """Return at once."""

    def wait_event(self, _event: Any) -> None:
        """Return at once."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record *event*, or a new one."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: all work is done."""
        return True


ONLY_STREAM = Stream()


def current_stream(_device: Any = None) -> Stream:
    """Return the one stream there is."""
    return ONLY_STREAM


def set_stream(_stream: Any) -> None:
    """Stay on the one stream there is."""


@contextmanager
def stream(_stream: Any) -> Iterator[None]:
    """Run the block on the one stream there is."""
    yield
