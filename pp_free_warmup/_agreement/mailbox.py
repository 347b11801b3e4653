"""The key-value store behind the process groups, asked in ways that never wait."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from pp_free_warmup import _megatron as megatron
from pp_free_warmup.errors import UnsupportedSetup

# No value in the store ever equals this, so comparing with it only reads.
NOTHING = "\x00"


class StoreLost(RuntimeError):
    """The store does not answer any more."""


class Mailbox:
    """A store, through a connection of our own.

    A connection of our own (``Store.clone``, torch 2.8) matters: one client answers one question at
    a time, so a thread that waits in the trainer's would hold us up, and we the trainer.

    Args:
        store: The store to connect to.
    """

    def __init__(self, store: Any) -> None:
        self._store: Any = self._ask(store.clone)

    @classmethod
    def of_world(cls) -> Mailbox:
        """Connect to the store that all ranks of the world reach.

        Raises:
            UnsupportedSetup: There is none (``no-store``).
        """
        store = megatron.store_of_world()
        if store is None:
            raise UnsupportedSetup(
                "The ranks cannot agree on a warmup: their process groups have no key-value store [no-store].",
                found=f"backend {dist.get_backend()!r}; expected one that meets through a store, such as nccl or gloo.",
                matters="A rank that warms up while another does not would leave both waiting for each other.",
                do="Initialise torch.distributed with nccl or gloo, or run without the warmup.",
            )
        return cls(store)

    def peek(self, key: str) -> str | None:
        """Return the value of *key*, or None if it has none; a plain ``get`` would wait for one."""
        value = self._ask(self._store.compare_set, key, NOTHING, NOTHING).decode()
        return None if value == NOTHING else value

    def write(self, key: str, value: str) -> None:
        """Set *key*, whatever it was."""
        self._ask(self._store.set, key, value)

    def write_first(self, key: str, value: str) -> str:
        """Set *key* unless somebody did before; return what it is now."""
        return str(self._ask(self._store.compare_set, key, "", value).decode())

    def append(self, key: str, line: str) -> None:
        """Add a line to *key*."""
        self._ask(self._store.append, key, line)

    def count(self, key: str) -> int:
        """Raise the number under *key* by one and return it."""
        return int(self._ask(self._store.add, key, 1))

    def forget(self, keys: Iterable[str]) -> None:
        """Delete *keys*, those that exist."""
        for key in keys:
            self._ask(self._store.delete_key, key)

    @staticmethod
    def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except RuntimeError as lost:
            raise StoreLost(str(lost).splitlines()[0]) from lost


def store_host() -> str:
    """Say which process serves the store, as far as this one can tell."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "torchrun's agent of the first host"
    return "global rank 0, unless the launcher serves the store"
