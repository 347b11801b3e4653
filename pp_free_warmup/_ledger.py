"""Which models are warm, and whether a pass is running: exactly once, and never inside itself."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pp_free_warmup.errors import WarmupFailed

TRAINING = "training"
FORWARD_ONLY = "forward-only"


def kind_of(forward_only: bool) -> str:
    """Name the two kinds of call; each is warmed once: they compile different kernels."""
    return FORWARD_ONLY if forward_only else TRAINING


@dataclass(frozen=True, slots=True)
class Page:
    """What is known about one kind of call of one model.

    Attributes:
        warm: True once it was warmed; False when it was closed without (refused, failed).
        reason: Why it was closed without a warmup, as text.
    """

    warm: bool
    reason: str = ""


class Ledger:
    """Remember, per model and kind of call, what was done; models and process groups are held weakly.

    A model is found under the first chunk as passed and under the same chunk unwrapped, so that a
    second block or decorator that sees it through another wrapper does not warm it again.

    What is remembered of a pipeline group counts for every model and kind: it was decided in a vote, so
    it is the same on all ranks of that vote, whichever model or kind each of them brought to it. Groups
    that were rebuilt are others, and start afresh.
    """

    def __init__(self) -> None:
        self._pages: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, Page]] = weakref.WeakKeyDictionary()
        self._primed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._apart: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
        self._has_seen_rebuilt = False
        self._turn = threading.Lock()
        self._running_thread: int | None = None

    def page(self, chunk: torch.nn.Module, kind: str) -> Page | None:
        """Return what is known about this first chunk and kind, or None while the kind is open."""
        pages = self._pages.get(chunk)
        return None if pages is None else pages.get(kind)

    def write(self, chunks: tuple[torch.nn.Module, ...], kind: str, page: Page) -> None:
        """Write a page under each of the given faces of one model (as passed, unwrapped)."""
        for chunk in chunks:
            self._pages.setdefault(chunk, {})[kind] = page

    def is_primed(self, group: Any) -> bool:
        """Tell whether the channels of this pipeline group are open."""
        return group in self._primed

    def prime(self, group: Any, *, rebuilt: bool = False) -> bool:
        """Note that the channels of this pipeline group are open, for every kind that is warm.

        Args:
            group: The pipeline group.
            rebuilt: The group replaces an earlier one, and nothing but its channels was opened.

        Returns:
            Whether that is news: some trainers rebuild their groups at every step.
        """
        self._primed.add(group)
        news = not (rebuilt and self._has_seen_rebuilt)
        self._has_seen_rebuilt |= rebuilt
        return news

    def part(self, group: Any, kinds: Iterable[str]) -> None:
        """Note that ranks of this pipeline group's votes make these kinds of call at different times.

        Whoever voted for one of them again might wait for ranks that do not: nobody votes for it any more.
        """
        self._apart[group] = self._apart.get(group, frozenset()) | frozenset(kinds)

    def is_apart(self, group: Any, kind: str) -> bool:
        """Tell whether nobody in this pipeline group votes for this kind of call any more."""
        return kind in self._apart.get(group, ())

    @property
    def running(self) -> bool:
        """True while a pass runs in this process, whichever thread asks (autograd has its own)."""
        return self._running_thread is not None

    @property
    def running_here(self) -> bool:
        """True while a pass runs in the thread that asks."""
        return self._running_thread == threading.get_ident()

    @property
    def taken(self) -> bool:
        """True while some thread has its `turn`: random states, gradients and flags may be the warmup's."""
        return self._turn.locked()

    @contextmanager
    def turn(self, patience: float) -> Iterator[None]:
        """Let one thread at a time prepare a call; the others wait for its state to be put back.

        Args:
            patience: Seconds to wait at most.

        Raises:
            WarmupFailed: Another thread's warmup did not end in time.
        """
        if not self._turn.acquire(timeout=min(patience, threading.TIMEOUT_MAX)):
            raise WarmupFailed(
                "Another thread of this process is still warming a pipeline.",
                found=f"it did not end within {patience:.0f} s; expected its end.",
                matters="Running the schedule now would train with the warmup's random state and gradients.",
                do="Look at what the other thread does (py-spy dump), or pass a longer timeout.",
            )
        try:
            yield
        finally:
            self._turn.release()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Mark this thread as running a pass: a schedule called from inside it is left alone."""
        assert self._running_thread is None, "a pass was started inside a pass"
        self._running_thread = threading.get_ident()
        try:
            yield
        finally:
            self._running_thread = None


ledger = Ledger()


def in_warmup() -> bool:
    """Tell whether the local pass is running now.

    Ask it in a loss or a forward step that must not log, count or assert on real data.

    Returns:
        True inside the local pass, also in autograd's threads; False in real steps.

    Example:
        >>> in_warmup()
        False
    """
    return ledger.running
