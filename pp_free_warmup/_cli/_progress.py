"""Show what every rank does now: in place on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

LOOK_S = 0.5
LINE_S = 4.0
STARTING = "imports torch and Megatron"


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
        self._console.print(self._line(text), highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def following(self, notes: Path, ranks: int, title: str) -> Iterator[None]:
        """Show, during the block, what the ranks have written into the folder *notes*."""
        done = threading.Event()

        def text() -> str:
            return f"{self.heading}{title}: {_notes(notes, ranks)}"

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


def _notes(folder: Path, ranks: int) -> str:
    """Read what the ranks do, those that do the same together; one without a note has not begun."""
    doing: dict[str, list[int]] = {}
    for rank in range(ranks):
        note = folder / f"rank {rank}"
        doing.setdefault((note.read_text() if note.exists() else "") or STARTING, []).append(rank)
    if len(doing) == 1:
        return f"all stages: {next(iter(doing))}"
    return "; ".join(
        f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}: {what}" for what, stages in doing.items()
    )
