"""Which models are warm, and whether a pass is running: exactly once, and never inside itself."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
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
        generation: The pipeline group whose channels were opened, held weakly; None if none were.
        reason: Why it was closed without a warmup, as text.
    """

    warm: bool
    generation: weakref.ref[Any] | None
    reason: str = ""

    def serves(self, group: Any) -> bool:
        """Tell whether a call in this pipeline group needs nothing: closed, or its channels are open."""
        alive = None if self.generation is None else self.generation()
        return not self.warm or (alive is not None and alive is group)


class Ledger:
    """Remember, per model and kind of call, what was done; models are held weakly.

    A model is found under the first chunk as passed and under the same chunk unwrapped, so that a
    second block or decorator that sees it through another wrapper does not warm it again.
    """

    def __init__(self) -> None:
        self._pages: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, Page]] = weakref.WeakKeyDictionary()
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
