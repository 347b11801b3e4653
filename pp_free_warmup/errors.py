"""Every exception a user of this library can meet.

Each message has four parts, in this order: what is wrong, what was found and
expected, why it matters, what to do. `WarmupError` asks for them by name, so
none can be forgotten.
"""

from __future__ import annotations


class WarmupError(Exception):
    """Report something that a user of the warmup has to know.

    Args:
        wrong: What is wrong, one sentence.
        found: What was found, and what was expected instead.
        matters: Why that matters for the user's run.
        do: What the user can do now.

    Example:
        >>> print(WarmupError("No model.", found="None, expected a Module.",
        ...                   matters="Nothing can be warmed.", do="Pass one."))
        No model.
        Found: None, expected a Module.
        Why it matters: Nothing can be warmed.
        What to do: Pass one.
    """

    def __init__(self, wrong: str, *, found: str, matters: str, do: str) -> None:
        super().__init__(f"{wrong}\nFound: {found}\nWhy it matters: {matters}\nWhat to do: {do}")
        self.wrong = wrong
        self.found = found
        self.matters = matters
        self.do = do


class UnsupportedSetup(WarmupError, ValueError):
    """The user's own choice of model, options or call cannot be warmed."""


class WrongCall(WarmupError, TypeError):
    """A schedule or a function of this library was called in a form it does not take."""


class NotInitialized(WarmupError, RuntimeError):
    """Megatron or torch.distributed is not initialised yet."""


class UnsupportedMegatron(WarmupError, RuntimeError):
    """The installed megatron-core lacks, or has renamed, something this library relies on."""


class WarmupFailed(WarmupError, RuntimeError):
    """The warmup failed on some rank, and the run is to stop; this rank's state was put back."""


class RankSilent(WarmupFailed):
    """A rank gave no sign of life for longer than the timeout."""


class RestoreFailed(WarmupError, RuntimeError):
    """A guard could not put its state back: this run can no longer be trusted."""


class TraceFound(WarmupError, RuntimeError):
    """With ``verify=True``: something was not as before after the pass was undone."""
