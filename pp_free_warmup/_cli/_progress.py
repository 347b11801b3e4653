"""Show what every rank does now: in place on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

LOOK_S = 0.5
LINE_S = 4.0


class Progress:
    """What is shown while the demo runs; written to *console*, which should be the standard error's.

    Args:
        console: Where to write.
        timeout: Seconds that the whole demo may take.
    """

    def __init__(self, console: Console, timeout: float) -> None:
        self._console = console
        self._began = time.monotonic()
        self._timeout = timeout
        self.heading = ""

    @property
    def left(self) -> float:
        """Seconds left until the timeout, at least one."""
        return max(1.0, self._timeout - (time.monotonic() - self._began))

    def say(self, text: str) -> None:
        """Write one line, with the seconds since the start."""
        self._console.print(self._line(text), highlight=False)

    @contextmanager
    def following(self, notes: Path, ranks: int, title: str) -> Iterator[None]:
        """Show, during the block, what the ranks have written into the folder *notes*."""
        done = threading.Event()

        def text() -> str:
            return f"{self.heading}{title} | {' | '.join(_notes(notes, ranks))}"

        show = self._live if self._console.is_terminal else self._lines
        thread = threading.Thread(target=show, args=(text, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _live(self, text: Callable[[], str], done: threading.Event) -> None:
        with Live(console=self._console, transient=True, refresh_per_second=8) as live:
            spinner = Spinner("dots")
            live.update(spinner)
            while not done.wait(LOOK_S):
                spinner.update(text=Text(self._line(text())))

    def _lines(self, text: Callable[[], str], done: threading.Event) -> None:
        self.say(text())
        while not done.wait(LINE_S):
            self.say(text())

    def _line(self, text: str) -> str:
        return f"{time.monotonic() - self._began:5.0f} s  {text}"


def _notes(folder: Path, ranks: int) -> list[str]:
    """Read what each rank does; one without a note has not begun."""
    notes = []
    for rank in range(ranks):
        note = folder / f"rank {rank}"
        text = note.read_text() if note.exists() else ""
        notes.append(f"stage {rank}: {text or 'starts'}")
    return notes if len(set(n.partition(': ')[2] for n in notes)) > 1 else [f"all stages: {text or 'starts'}"]
