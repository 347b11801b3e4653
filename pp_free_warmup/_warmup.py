"""`pipeline_warmup`: who is warmed, when, and what is remembered of it."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import _patch, _preflight
from pp_free_warmup._agreement import Decision, Word
from pp_free_warmup._call import Guard, ScheduleCall, faces_of, first_chunk, read_call, refuse_impossible
from pp_free_warmup._failures import describe
from pp_free_warmup._flow import Flow, speaks_for
from pp_free_warmup._ledger import Page, kind_of, ledger
from pp_free_warmup._options import Options
from pp_free_warmup._report import WarmupReport, say
from pp_free_warmup.errors import UnsupportedMegatron, UnsupportedSetup

DEFAULT_PATIENCE_S = 1800.0
WAY_IN = (
    "A schedule function fetched before the block is not reached: wrap that function itself, "
    "forward_backward_func = warm_first_call(forward_backward_func), or open the block before it is fetched."
)
PASSED_BY = f"pp_free_warmup: a pipeline step runs past an open pipeline_warmup block, without a warmup. {WAY_IN}"
Activations = torch.Tensor | list[torch.Tensor] | None
NOT_CALLED = (
    "pp_free_warmup: a pipeline_warmup block ended and no pipeline schedule was called through it. "
    f"{WAY_IN} A block with model= takes that model's calls only."
)


def pipeline_warmup(
    model: torch.nn.Module | Iterable[torch.nn.Module] | None = None,
    optimizer: Any = None,
    *,
    enabled: bool | Callable[[], bool] = True,
    channels: str | None = "pipeline",
    extra_guards: Iterable[Guard] = (),
    timeout: float | None = None,
    on_unsupported: str = "skip",
    on_failure: str = "continue",
    activations: Callable[[ScheduleCall, int], Activations] | None = None,
    verify: bool = False,
    shapes: Iterable[Any] = (),
    single_flight: Any = None,
    report_to: str | os.PathLike[str] | None = None,
) -> PipelineWarmup:
    """Make the first pipeline-parallel step inside the block compile all stages at the same time.

    Args:
        model: A chunk or a list of chunks, wrapped or not; None: any. Calls with another model run untouched.
        optimizer: Read by ``verify`` only, never stepped.
        enabled: A bool, or a callable asked at every call until the kind is warm; alike on all ranks.
        channels: What to open after the pass: ``"pipeline"``, ``"all"`` (reductions too) or None.
        extra_guards: Guards for state of your own; see `pp_free_warmup.guards`.
        timeout: Seconds that a rank may give no sign of life; None takes the pipeline group's.
        on_unsupported: ``"skip"`` runs without a warmup and says why, ``"raise"`` raises on all ranks.
        on_failure: When the pass fails and all have put back: ``"continue"`` runs without, ``"raise"`` raises.
        activations: Makes what arrives, for stages that no random numbers suit: (call, chunk index) -> tensors.
        verify: Compare all reachable state before and after, and raise `TraceFound` naming what differs.
        shapes: Not built yet: only ``()``.
        single_flight: Not built yet: only None.
        report_to: A path to which global rank 0 writes the last report as JSON.

    Returns:
        A context manager around the real step; ``as warmup`` gives the handle with the ``report``.
        What is not as described here raises `UnsupportedSetup` at once.
    """
    chosen = (enabled, channels, extra_guards, timeout, on_unsupported, on_failure, activations)
    return PipelineWarmup(model, Options(*chosen, verify, shapes, single_flight, report_to), optimizer)


class PipelineWarmup:
    """One warmup block: armed between enter and exit; holds the model weakly and the reports.

    Attributes:
        reports: One `WarmupReport` per warmup or skip, oldest first.
    """

    def __init__(self, model: Any, options: Options, optimizer: Any = None) -> None:
        self._models = None if model is None else tuple(weakref.ref(face) for face in faces_of(model))
        self._options = options
        self._optimizer = (
            (lambda: optimizer) if isinstance(optimizer, (list, tuple, type(None))) else weakref.ref(optimizer)
        )
        self._off: set[str] = set()
        self._skips: set[str] = set()
        self.reports: list[WarmupReport] = []
        self.called = False
        self._told = self._was_passed = False
        self.depth = 2  # frames from __exit__ to the user's line, for warnings

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as a fresh handle with the same options: nothing is warm there yet."""
        if self._models is not None or self._optimizer() is not None:
            raise UnsupportedSetup(
                "A function decorated for one model cannot be sent to another process.",
                found="warm_first_call with model= or optimizer=; expected neither.",
                matters="They are objects of this process; over there the warmup would not know them.",
                do="Leave model= and optimizer= out, or decorate the function in the process that calls it.",
            )
        return PipelineWarmup, (None, self._options), {"depth": self.depth}

    @property
    def report(self) -> WarmupReport:
        """The latest report; ``outcome`` is ``"not called"`` while no schedule was called."""
        if self.reports:
            return self.reports[-1]
        return WarmupReport("skipped", reason="nothing was left to do") if self.called else WarmupReport("not called")

    def __enter__(self) -> PipelineWarmup:
        try:
            _patch.arm(self)
        except UnsupportedMegatron:
            if not self._options.is_off_for_good:  # switching it off is the way out that the error names
                raise
        return self

    def __exit__(self, *error: object) -> None:
        _patch.disarm(self, self.depth)
        if not self.called and not self._told and error[0] is None and not self._options.is_off_for_good:
            self._told = True
            warnings.warn(NOT_CALLED, RuntimeWarning, stacklevel=self.depth)

    def passed_by(self) -> None:
        """Say, once and at the first step already, that it runs past this block."""
        if self._was_passed or self._options.is_off_for_good or not megatron.has_stages():
            return
        self._was_passed = True
        if torch.distributed.get_rank() == 0:
            say(PASSED_BY)

    def takes(self, keywords: Mapping[str, Any]) -> bool:
        """Tell whether this call's model is the one this block was given."""
        if self._models is None:
            return True
        asked = first_chunk(keywords)
        mine = [model() for model in self._models]
        return any(face is chunk for face in (asked, megatron.unwrapped(asked)) for chunk in mine)

    def run(self, schedule: Callable[..., Any], keywords: dict[str, Any]) -> Any:
        """Warm up if that is still to be done, then run the schedule for real."""
        return schedule(**self.prepare(schedule, keywords))

    def prepare(self, schedule: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
        """Warm up if that is still to be done; return what to call the real schedule with."""
        self.called = True
        _patch.reached()
        kind = kind_of(bool(keywords.get("forward_only", False)))
        if ledger.running_here or (_is_settled(keywords, kind) and not ledger.taken):
            return keywords
        if ledger.page(first_chunk(keywords), kind) is None:
            refuse_impossible(keywords)
        with ledger.turn(self._options.timeout or DEFAULT_PATIENCE_S):
            if _is_settled(keywords, kind):
                return keywords
            known = len(self.reports)
            keywords = self._prepared(schedule, keywords, kind)
            self._tell_others(keywords, self.reports[known:])
        return keywords

    def _tell_others(self, keywords: Mapping[str, Any], reports: list[WarmupReport]) -> None:
        """Let the other armed blocks of this model report what this one did in their stead."""
        for block in {id(each): each for each in _patch.armed() if each is not self and each.takes(keywords)}.values():
            block.reports.extend(reports)

    def _prepared(self, schedule: Callable[..., Any], keywords: dict[str, Any], kind: str) -> dict[str, Any]:
        """Do what this call still needs; return the keywords for the real schedule."""
        quiet = _preflight.nothing_to_do(schedule, keywords)
        if quiet:
            if quiet not in self._skips:
                self._note(WarmupReport("skipped", kind, reason=quiet), speaks=torch.distributed.get_rank() == 0)
            return keywords
        if kind in self._off and not self._options.is_on():
            return keywords
        call = read_call(schedule, keywords)
        refused = _preflight.nobody_to_ask(call)
        if refused is not None:
            if self._options.is_on():
                self._close(call, kind, refused.told)
                self._skip(WarmupReport("skipped", kind, reason=refused.told), call, refused=True)
            return keywords
        return keywords if ledger.is_apart(megatron.generation_of(keywords), kind) else self._warmed(call, kind)

    def _warmed(self, call: ScheduleCall, kind: str) -> dict[str, Any]:
        flow = Flow(call, self._options, self._optimizer())
        try:
            report = flow.run()
        except BaseException as error:
            self._close(call, kind, describe(error))
            self._note(WarmupReport("failed", kind, reason=describe(error)), speaks=False)
            raise
        decision = flow.decision
        assert decision is not None
        if report.outcome in ("skipped", "failed"):
            self._remember(decision, call, report)
        if report.outcome == "skipped":
            if decision.word not in self._skips:
                self._skip(report, call, refused=decision.word is Word.REFUSE)
            if decision.word is Word.IDLE:
                self._skips.add(Word.IDLE)  # the ranks named may be others each time; told once all the same
            return dict(call.keywords)
        self._note(report, speaks=speaks_for(call))
        return {**call.keywords, "data_iterator": flow.data_iterator()}

    def _remember(self, decision: Decision, call: ScheduleCall, report: WarmupReport) -> None:
        """Write down whom this call closes: nobody where some rank had no microbatches this time."""
        if decision.word is Word.OFF:
            self._off.add(report.kind)
        if decision.apart:
            ledger.part(megatron.generation_of(call.keywords), decision.kinds)
        if decision.word not in (Word.OFF, Word.IDLE, Word.APART):
            self._close(call, report.kind, report.reason)

    def _skip(self, report: WarmupReport, call: ScheduleCall, *, refused: bool) -> None:
        self._note(report, speaks=speaks_for(call))
        if refused and self._options.on_unsupported == "raise":
            raise UnsupportedSetup(
                "This pipeline cannot be warmed.",
                found=report.reason,
                matters="A wrong warmup is worse than none, and on_unsupported='raise' asks to stop instead.",
                do="Change the setup as the reason says, or leave on_unsupported at 'skip'.",
            )

    def _note(self, report: WarmupReport, *, speaks: bool) -> None:
        self.reports.append(report)
        if report.outcome == "skipped":
            if speaks and report.reason not in self._skips:
                say(report.headline())
            self._skips.add(report.reason)
        path = self._options.report_to
        if path is not None and torch.distributed.get_rank() == 0:
            report.write_to(Path(path))

    @staticmethod
    def _close(call: ScheduleCall, kind: str, reason: str) -> None:
        first = call.chunks[0]
        ledger.write((first, megatron.unwrapped(first)), kind, Page(warm=False, reason=reason))


def _is_settled(keywords: Mapping[str, Any], kind: str) -> bool:
    """Tell whether this call needs no warmup any more; the whole cost of a warm call."""
    page = ledger.page(first_chunk(keywords), kind)
    return page is not None and (not page.warm or ledger.is_primed(megatron.generation_of(keywords)))
