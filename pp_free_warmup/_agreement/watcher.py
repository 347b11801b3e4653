"""The thread that shows this rank is alive while it works, and hears when another one fails."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

from pp_free_warmup._agreement.mailbox import StoreLost
from pp_free_warmup._agreement.words import Decision, Word
from pp_free_warmup._report import logger, say


class Watcher:
    """Calls *beat* and *hear* every *period* seconds on a thread of its own, until stopped.

    A thread that is still alive when the interpreter exits would abort the process, so stopping
    joins it, and `atexit` stops it if nobody else did.

    Args:
        period: Seconds between two rounds.
        beat: Publishes this rank's sign of life.
        hear: Returns the decision of the vote to come, if there is one already.
        progress: Returns how far all stages are, one line; None on ranks that need not tell.
        on_progress: Called with that line.
        every: Seconds between two such lines.
    """

    def __init__(
        self,
        period: float,
        beat: Callable[[], None],
        hear: Callable[[], Decision | None],
        progress: Callable[[], str] | None,
        on_progress: Callable[[str], None],
        every: float,
    ) -> None:
        self._period = period
        self._beat = beat
        self._hear = hear
        self._progress = progress
        self._on_progress = on_progress
        self._every = every
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pp_free_warmup watcher", daemon=True)
        self.heard: Decision | None = None

    def start(self) -> None:
        """Start the thread."""
        atexit.register(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._stopped.set()
        self._thread.join()
        atexit.unregister(self.stop)

    def _run(self) -> None:
        told = time.monotonic()
        try:
            while not self._stopped.wait(self._period):
                self._beat()
                self._listen()
                if self._progress is not None and time.monotonic() - told >= self._every:
                    told = time.monotonic()
                    self._on_progress(self._progress())
        except StoreLost as lost:
            say(f"pp_free_warmup: the store of the process groups is lost: {lost}")

    def _listen(self) -> None:
        if self.heard is not None:
            return
        decision = self._hear()
        if decision is not None and decision.word is Word.FAILED:
            self.heard = decision
            told = decision.silent or "; ".join(f"rank {one.rank} failed: {one.reason}" for one in decision.reasons)
            logger.error("pp_free_warmup: %s; this rank finishes what it does, then it ends as well", told)
