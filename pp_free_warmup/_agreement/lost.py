"""What is said where a rank, or the store that all ranks vote through, is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup._agreement.mailbox import StoreLost, store_host
from pp_free_warmup._agreement.signs import STUCK_TIMEOUTS
from pp_free_warmup.errors import RankSilent


@contextmanager
def store_answers() -> Iterator[None]:
    """Let a lost store leave the block as the error for people."""
    try:
        yield
    except StoreLost as lost:
        raise store_lost(lost) from lost


def rank_silent(silent: str, timeout: float) -> RankSilent:
    """Return the error about ranks that are lost or stuck."""
    return RankSilent(
        "The warmup was given up on all ranks: some were not heard of, or got nowhere.",
        found=f"{silent}; expected a sign of life at least every {timeout:g} s, and progress at least every "
        f"{STUCK_TIMEOUTS * timeout:g} s.",
        matters="Ranks that go on without the others would wait for them in the pipeline until its timeout.",
        do="Look at the named ranks' logs. A rank that never came to this call may have no pipeline_warmup block "
        "around it, or may have left before it; a rank that is only slow needs a longer timeout=.",
    )


def store_lost(lost: StoreLost) -> RankSilent:
    """Return the error about the process that serves the store."""
    return RankSilent(
        "The warmup was given up on this rank: the process that serves the key-value store is lost.",
        found=f"{lost}; expected an answer from the store ({store_host()}).",
        matters="The ranks cannot agree any more on whether to warm up.",
        do="Look at the log of that process: it ended before this one.",
    )
