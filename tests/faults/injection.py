"""What runs on each rank of a trial: the fault put in its place, the call, and what it left behind."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_trials import Trial
from forked import groups_that_wait

from pp_free_warmup import _channels, in_warmup, pipeline_warmup
from pp_free_warmup import _megatron as megatron
from pp_free_warmup import _preflight as preflight
from pp_free_warmup._agreement import Ballot
from pp_free_warmup._agreement.meeting import Meeting
from pp_free_warmup._ledger import TRAINING, Page, ledger
from pp_free_warmup._trace import changes, observed
from pp_free_warmup._undo import swapped
from pp_free_warmup.testing import models
from pp_free_warmup.testing._recording import without_identity
from pp_free_warmup.testing.models import Layout

SILENCE = 2.0  # the warmup's timeout, seconds
GROUP = 6.0  # gloo's timeout
STALL = 3.0  # ten times what a whole warmup of these models takes
SIZES = {"hidden": 16, "heads": 2, "seq": 8, "vocab": 32, "micro_batch": 1, "num_microbatches": 4}
LAYOUTS = {
    "pp4": (4, Layout(pp=4, layers=4, **SIZES)),
    "tp2": (4, Layout(pp=2, tp=2, layers=2, **SIZES)),
    "dp2": (4, Layout(pp=2, layers=2, distributed_optimizer=True, overlap_grad_reduce=True, **SIZES)),
    "vp2": (2, Layout(pp=2, vp=2, layers=4, **SIZES)),
}


class Injected(RuntimeError):
    """The error of a trial."""


@dataclass
class Result:
    """How the call ended on one rank, and what it left.

    Attributes:
        error: The error's type name; empty if the call returned.
        text: The error's text, its causes included.
        outcome: The report's outcome.
        reason: The report's reason.
        seconds: From the fault's earliest moment (when the call began) to the call's end.
        leaks: Every field that differs: after an error from before the call, else from a run without a warmup.
    """

    error: str
    text: str
    outcome: str
    reason: str
    seconds: float
    leaks: list[str]


def on_rank(trial: Trial, mode: str, twins: str) -> Result:
    """Run one trial on this rank, and one step more if it goes on.

    Args:
        trial: What to do, and where.
        mode: What to pass as ``on_failure``.
        twins: Where the runs without a warmup left their states.
    """
    with groups_that_wait(GROUP):
        training = models.build(LAYOUTS[trial.layout][1])
    before = observed(training.chunks, training.optimizer).fields
    dist.barrier()
    began = time.monotonic()
    error: BaseException | None = None
    with ExitStack() as placed:
        enabled, guards = place(trial, training, placed)
        block = pipeline_warmup(training.chunks, enabled=enabled, timeout=SILENCE, extra_guards=guards, on_failure=mode)
        try:
            with block:
                steps(training)
        except BaseException as failure:  # noqa: BLE001 - how a call fails is what a trial asks
            error = failure
    seconds = time.monotonic() - began
    after = observed(training.chunks, training.optimizer).fields
    if error is None:
        before = pickle.loads(Path(twins, f"{trial.layout} {dist.get_rank()}").read_bytes())
        after = without_identity(after)
    # Where the real step itself complains, what it left is what it leaves without a warmup, too.
    leaks = [] if block.report.outcome == "failed" and in_own_words(trial, mode) else changes(before, after)
    kind, report = "" if error is None else type(error).__name__, block.report
    return Result(kind, _text(error), report.outcome, report.reason, seconds, leaks)


def twin(layout: str, twins: str) -> None:
    """Take the steps without a warmup and write down the state after them."""
    training = models.build(LAYOUTS[layout][1])
    observed(training.chunks, training.optimizer)
    dist.barrier()
    steps(training)
    fields = without_identity(observed(training.chunks, training.optimizer).fields)
    Path(twins, f"{layout} {dist.get_rank()}").write_bytes(pickle.dumps(fields))


def steps(training: Any) -> None:
    """Call the schedule as Megatron's trainer does, and take one whole step more."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    get_forward_backward_func()(**training.schedule_arguments())
    training.step()


def in_own_words(trial: Trial, mode: str) -> bool:
    """Tell whether the real step is to run and to fail, as without a warmup: it has no data."""
    return trial.fault == "exhaust" and mode == "continue"


def _text(error: BaseException | None) -> str:
    if error is None:
        return ""
    return f"{error}\n{_text(error.__cause__ or error.__context__)}"


def place(trial: Trial, training: Any, placed: ExitStack) -> tuple[bool, list[Any]]:
    """Put the fault of *trial* in its place on this rank, if this rank is to meet it.

    Returns:
        What to pass as ``enabled`` and as ``extra_guards``.
    """
    if dist.get_rank() in trial.off:
        return False, []
    if dist.get_rank() not in trial.ranks:
        return True, []
    if trial.fault == "off":
        return False, []
    if trial.fault == "warm":
        ledger.write((training.chunks[0],), TRAINING, Page(warm=True))
    if trial.fault == "exhaust":
        training.iterators[:] = [None if one is None else iter(()) for one in training.iterators]
    if trial.fault == "refuse":
        refused = preflight.Refusal("injected", "a reason that was injected", "nothing")
        placed.enter_context(swapped(preflight, "CHECKS", (lambda _call: refused,)))
    act = _at_nth(trial.nth, ACTS.get(trial.fault, _nothing))
    if trial.point in ("save", "restore"):
        return True, [_guard(act if trial.point == "save" else _nothing, act if trial.point == "restore" else _nothing)]
    if trial.point:
        PLACES[trial.point.split()[0]](trial, training, placed, act)
    return True, []


def _nothing() -> None: ...


def _raise() -> None:
    raise Injected("injected error")


def _out_of_memory() -> None:
    raise torch.OutOfMemoryError("injected: out of memory")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stall() -> None:
    time.sleep(STALL)


ACTS = {"raise": _raise, "oom": _out_of_memory, "kill": _kill, "stall": _stall}


def _at_nth(nth: int, act: Callable[[], None]) -> Callable[[], None]:
    passed = [0]

    def acting() -> None:
        passed[0] += 1
        if passed[0] == nth + 1:
            act()

    return acting


def _guard(entering: Callable[[], None], leaving: Callable[[], None]) -> Any:
    @contextmanager
    def injected(_call: Any) -> Iterator[None]:
        entering()
        yield
        leaving()

    return injected


def _in_forward(_trial: Trial, training: Any, placed: ExitStack, act: Callable[[], None]) -> None:
    own = training.forward_step

    def failing(iterator: Any, chunk: Any) -> Any:
        outputs = own(iterator, chunk)
        if in_warmup():
            act()
        return outputs

    placed.enter_context(swapped(training, "forward_step", failing))


def _in_backward(_trial: Trial, training: Any, placed: ExitStack, act: Callable[[], None]) -> None:
    own = training.forward_step

    def failing(iterator: Any, chunk: Any) -> Any:
        output, loss = own(iterator, chunk)
        if in_warmup():
            output.register_hook(lambda _gradient: act())
        return output, loss

    placed.enter_context(swapped(training, "forward_step", failing))


def _in_vote(trial: Trial, _training: Any, placed: ExitStack, act: Callable[[], None]) -> None:
    _before(placed, Ballot, "vote", int(trial.point.split()[1]), act)


def _inside_vote(trial: Trial, _training: Any, placed: ExitStack, act: Callable[[], None]) -> None:
    """Act once this rank has spoken in the vote, where it would wait for the others."""
    _before(placed, Meeting, "_speak_up", int(trial.point.split()[1]), act)


def _in_channel(trial: Trial, _training: Any, placed: ExitStack, act: Callable[[], None]) -> None:
    _before(placed, megatron, "exchange", int(trial.point.split()[1]), act)
    assert _channels.megatron is megatron


def _before(placed: ExitStack, owner: Any, name: str, number: int, act: Callable[[], None]) -> None:
    """Act before the call with *number*, from 1, of ``owner.name``."""
    own = getattr(owner, name)
    at_nth = _at_nth(number - 1, act)

    def calling(*arguments: Any, **keywords: Any) -> Any:
        at_nth()
        return own(*arguments, **keywords)

    placed.enter_context(swapped(owner, name, calling))


PLACES = {
    "forward": _in_forward,
    "backward": _in_backward,
    "vote": _in_vote,
    "inside": _inside_vote,
    "channel": _in_channel,
}
