"""What follows from a failure: the word for the other ranks, and the text for people."""

from __future__ import annotations

import re

import torch

from pp_free_warmup._agreement import Decision, Word
from pp_free_warmup.errors import RestoreFailed, TraceFound, WarmupError, WarmupFailed

# Errors of these types leave a rank's state unknown.
NOT_UNDONE = (RestoreFailed, TraceFound)
INTERRUPTS = ("KeyboardInterrupt", "SystemExit", "GeneratorExit")
# What gloo and NCCL say when a transfer of theirs did not come to its end.
BROKEN_OFF = re.compile(r"gloo.*(connection|broken pipe|timed out|timeout|closed|reset)", re.IGNORECASE | re.DOTALL)

WENT_ON_COLD = (
    "pp_free_warmup: the %s warmup failed and was undone on every rank; this call and all later ones of its kind run "
    "without it, from the batches that were fetched: %s. If the run is sound, please report this line with what "
    "`pp-free-warmup doctor` prints; on_failure='raise' stops here and shows the traceback"
)


def word_of(trouble: BaseException | None) -> Word:
    """Return what a rank says whose state should be as before.

    Args:
        trouble: What went wrong there, if anything did.

    Returns:
        ``COLD`` where the run can go on without a warmup; ``STOP`` where a transfer broke off, because
        its process group does not work afterwards; ``FAILED`` where the state is unknown, and for
        interrupts.
    """
    if trouble is None:
        return Word.GO
    if isinstance(trouble, NOT_UNDONE) or not isinstance(trouble, Exception):
        return Word.FAILED
    return Word.STOP if _broke_off(trouble) else Word.COLD


def _broke_off(trouble: Exception) -> bool:
    if isinstance(trouble, (torch.distributed.DistBackendError, torch.distributed.DistNetworkError)):
        return True
    return type(trouble) is RuntimeError and BROKEN_OFF.search(str(trouble)) is not None


def describe(error: BaseException | None) -> str:
    """Return type and text of an error, never its traceback: nothing may keep the model alive."""
    if error is None:
        return ""
    text = f"{error.wrong} {error.found}".rstrip(".") if isinstance(error, WarmupError) else error
    return f"{type(error).__name__}: {text}"


def let_go(error: BaseException) -> None:
    """Drop the tracebacks of *error* and of what led to it: their frames hold the activations of the pass."""
    chain, seen = [error], {id(error)}
    while chain:
        one = chain.pop()
        one.__traceback__ = None
        fresh = [e for e in (one.__cause__, one.__context__) if e is not None and id(e) not in seen]
        seen.update(map(id, fresh))
        chain += fresh


def reasons_of(decision: Decision) -> str:
    """Name every rank that did not simply go, with its stage where it failed; or who makes which call."""
    if decision.apart:
        return f"ranks that vote together are in different calls: {decision.apart}; they run without a warmup"
    stages = {reason.rank: number for number, stage in enumerate(decision.stages) for reason in stage.reasons}
    return "; ".join(
        f"rank {rank}{f' (stage {stages[rank]})' if word is Word.COLD else ''}: {reason}"
        for rank, word, reason in decision.reasons
        if reason
    )


def failure(decision: Decision, data: str, step: str) -> WarmupFailed:
    """Return the error of a warmup that stops the run.

    Args:
        decision: Says which ranks failed, and why.
        data: What became of this rank's data, one sentence.
        step: What every rank was expected to do.
    """
    found = f"{reasons_of(decision)}; expected every rank to {step}."
    reasons = [reason for _, _, reason in decision.reasons]
    if any(reason.startswith(tuple(kind.__name__ for kind in NOT_UNDONE)) for reason in reasons):
        return WarmupFailed(
            "The warmup of the pipeline failed, and not every rank could undo it.",
            found=found,
            matters="The state of the ranks named is unknown; training from here could silently differ.",
            do="Stop this run. Start it again with PP_FREE_WARMUP=0 and report the error named above.",
        )
    if any(reason.startswith(INTERRUPTS) for reason in reasons):
        wrong, do = "The warmup of the pipeline was interrupted and undone.", "Start the run again when it is wanted."
    elif decision.word is Word.STOP:
        wrong = "The warmup of the pipeline failed and was undone, but a transfer between ranks broke off."
        do = "Look first at the rank whose error is no broken transfer; PP_FREE_WARMUP=0 runs without the warmup."
    else:
        wrong = "The warmup of the pipeline failed and was undone."
        do = (
            "Leave on_failure at 'continue' to go on without a warmup, or set PP_FREE_WARMUP=0; if the run is sound "
            "then, report the error named above."
        )
    return WarmupFailed(
        wrong,
        found=found,
        matters=f"This call's real step was not run, and this rank's state was put back.{data}",
        do=do,
    )
