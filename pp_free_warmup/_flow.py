"""One warmup from its first vote to its report: the steps of a pass, in their order.

    save -> vote -> local pass -> put back -> vote -> channels -> vote -> report

No step knows another; this module knows them all.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import torch

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import _preflight
from pp_free_warmup._agreement import Ballot, Call, Decision, Tally, Word
from pp_free_warmup._batches import Batches
from pp_free_warmup._call import ScheduleCall, refuse_mismatch
from pp_free_warmup._channels import ChannelReport, prime
from pp_free_warmup._ledger import Page, kind_of, ledger
from pp_free_warmup._local_pass import run_local_pass
from pp_free_warmup._options import Options
from pp_free_warmup._origin import say_once
from pp_free_warmup._report import NOTICE, StageReport, Stopwatch, WarmupReport, say
from pp_free_warmup._verify import verified
from pp_free_warmup.errors import RankSilent, RestoreFailed, TraceFound, WarmupError, WarmupFailed
from pp_free_warmup.guards import guarded

DRAWN_IN_ANOTHER_ORDER = (
    "pp_free_warmup: rank %d has %d data iterators that drew random numbers for their first batches; if they draw "
    "for every batch, a run without the warmup draws in another order, and its batches differ from this run's"
)


class Flow:
    """Prepare one schedule call: warm it, prime it, or find out why not.

    Args:
        call: The call.
        options: What the user chose.
        optimizer: Looked at where ``verify`` asks for it, never stepped.
    """

    def __init__(self, call: ScheduleCall, options: Options, optimizer: Any = None) -> None:
        self._call = call
        self._optimizer = optimizer
        self._options = options
        self._kind = kind_of(call.forward_only)
        self._stopwatch = Stopwatch()
        self._batches = Batches(call)
        model = type(megatron.unwrapped(call.chunks[0])).__name__
        told = Call(self._kind, len(call.chunks), model)
        self._ballot = Ballot(call.groups.pipeline, call.groups.stage, options.timeout, told)
        self._transfers: list[None] = []
        self.decision: Decision | None = None

    @property
    def speaks(self) -> bool:
        """True on the one rank of this call that writes to the log: first stage, first rank."""
        return speaks_for(self._call)

    def run(self) -> WarmupReport:
        """Go through the steps.

        Returns:
            What was done; ``outcome`` is ``"skipped"`` where some rank could or would not.

        Raises:
            WarmupFailed: A rank failed; this rank's state was put back.
            RestoreFailed: This rank's state could not be put back.
        """
        with self._ballot.watching():
            return self._steps()

    def _steps(self) -> WarmupReport:
        trouble = self._save_and_pass()
        decision = self.decision
        if decision is None:  # the guards could not save: say so where the others wait for the first vote
            decision = self._ballot.vote(Word.FAILED, describe(trouble))
            self._raise(trouble, decision)
        if decision.word is Word.FAILED:
            self._raise(trouble, decision)
        if not decision.is_off_everywhere:  # some rank has saved, and has put back by now, or could not
            word = Word.GO if trouble is None else Word.FAILED
            ended = self._ballot.vote(word, describe(trouble), self._stopwatch.seconds)
            if trouble is not None or ended.word is Word.FAILED:
                self._raise(trouble, ended)
        if decision.word not in (Word.GO, Word.WARM):
            return WarmupReport("skipped", self._kind, reason=reasons_of(decision))
        return self._open_channels(decision)

    def data_iterator(self) -> Any:
        """Return what the real schedule reads from: the caller's iterators, fetched batches first."""
        return self._batches.for_schedule()

    def _own_word(self) -> tuple[Word, str]:
        if not self._options.is_on():
            return Word.OFF, "switched off"
        if self._call.num_microbatches == 0:
            return Word.IDLE, "the call has no microbatches"
        refuse_mismatch(self._call)
        refused = _preflight.refusal(self._call)
        if refused is not None:
            return Word.REFUSE, refused.told
        page = ledger.page(self._call.chunks[0], self._kind)
        return (Word.WARM if page is not None and page.warm else Word.GO), ""

    def _save_and_pass(self) -> BaseException | None:
        """Save, take the first vote, run the pass if all go, put back; return what went wrong."""
        measure = self._stopwatch.measure
        try:
            word, reason = self._own_word()
            with ExitStack() as kept:
                if word in (Word.GO, Word.WARM):
                    if self._options.is_verified():
                        kept.enter_context(verified(self._call, self._optimizer, self._stopwatch))
                    with measure("save"):
                        kept.enter_context(guarded(self._call, self._options.extra_guards))
                        kept.enter_context(self._batches.rewound())
                with measure("agree"):
                    self.decision = self._ballot.vote(word, reason)
                if self.decision.word is Word.GO:
                    self._pass()
                with measure("restore"):
                    kept.close()
        except RankSilent:
            raise
        except BaseException as error:  # noqa: BLE001 - told to the other ranks, then raised by run()
            return error
        return None

    def _pass(self) -> None:
        if self.speaks:
            say_once(self._call.schedule)
            stages = self._call.groups.pipeline.size()
            say(
                f"pp_free_warmup: {stages} stages compile for their first {self._kind} call at the same time: "
                "compiling, not hung"
            )
        with self._stopwatch.measure("pass"), ledger.passing(), megatron.transfers_counted() as self._transfers:
            run_local_pass(self._call, self._batches, self._stopwatch, self._ballot.tell)
        if self._batches.drawing > 1:
            say(DRAWN_IN_ANOTHER_ORDER % (torch.distributed.get_rank(), self._batches.drawing))

    def _open_channels(self, decision: Decision) -> WarmupReport:
        opened, trouble = ChannelReport(), None
        try:
            if self._options.channels is not None:
                self._ballot.tell("opening channels")
                with self._stopwatch.measure("channels"):
                    opened = prime(self._call, everything=self._options.channels == "all")
        except Exception as error:  # noqa: BLE001 - told to the other ranks, and raised on all of them
            trouble = error
        word = Word.GO if trouble is None else Word.FAILED
        stages = self._ballot.vote(word, describe(trouble), self._stopwatch.seconds)
        if stages.word is Word.FAILED:
            raise self._failure(stages, "open its channels") from trouble
        self.settle(Page(warm=True))
        outcome = "warmed" if decision.word is Word.GO else "primed"
        is_news = ledger.prime(megatron.generation_of(self._call.keywords), rebuilt=outcome == "primed")
        report = WarmupReport(
            outcome=outcome,
            kind=self._kind,
            seconds=dict(self._stopwatch.seconds),
            total_s=self._stopwatch.total,
            channels=dict(opened.seconds),
            opened=opened.opened,
            transfers_in_pass=len(self._transfers),
            stages=tuple(map(_stage_report, range(len(stages.stages)), stages.stages)),
        )
        if self.speaks:
            say(report.headline(), NOTICE if is_news else logging.DEBUG)
        return report

    def settle(self, page: Page) -> None:
        """Write this call's kind into the ledger, under both faces of its first chunk."""
        first = self._call.chunks[0]
        ledger.write((first, megatron.unwrapped(first)), self._kind, page)

    def _raise(self, trouble: BaseException | None, decision: Decision) -> None:
        if isinstance(trouble, WarmupError) or (trouble is not None and not isinstance(trouble, Exception)):
            raise trouble
        raise self._failure(decision) from trouble

    def _failure(self, decision: Decision, step: str = "finish its local pass") -> WarmupFailed:
        found = f"{reasons_of(decision)}; expected every rank to {step}."
        not_undone = (RestoreFailed.__name__, TraceFound.__name__)
        if any(reason.startswith(not_undone) for _, _, reason in decision.reasons):
            return WarmupFailed(
                "The warmup of the pipeline failed, and not every rank could undo it.",
                found=found,
                matters="The state of the ranks named is unknown; training from here could silently differ.",
                do="Stop this run. Start it again with PP_FREE_WARMUP=0 and report the error named above.",
            )
        fetched = self._batches.fetched
        if self._batches.exhausted:
            data = " A data iterator had no batch for it."
        else:
            data = f" {fetched} batch(es) fetched on this rank are consumed." if fetched else ""
        return WarmupFailed(
            "The warmup of the pipeline failed and was undone.",
            found=found,
            matters=f"This call's real step was not run, and this rank's state was put back.{data}",
            do="Mend the error named above; to run without the warmup, set PP_FREE_WARMUP=0.",
        )


def speaks_for(call: ScheduleCall) -> bool:
    """Tell whether this rank is the one that logs for the call."""
    return bool(call.groups.pipeline.rank() == 0 and all(group.rank() == 0 for group in call.groups.stage))


def describe(error: BaseException | None) -> str:
    """Return type and text of an error, never its traceback: nothing may keep the model alive."""
    if error is None:
        return ""
    text = f"{error.wrong} {error.found}".rstrip(".") if isinstance(error, WarmupError) else error
    return f"{type(error).__name__}: {text}"


def _stage_report(stage: int, said: Tally) -> StageReport:
    return StageReport(
        stage=stage,
        ranks=said.ranks,
        least={phase: spread.least for phase, spread in said.detail.items()},
        most={phase: spread.most for phase, spread in said.detail.items()},
        quickest={phase: spread.least_rank for phase, spread in said.detail.items()},
        slowest={phase: spread.most_rank for phase, spread in said.detail.items()},
    )


def reasons_of(decision: Decision) -> str:
    """Name every rank that did not simply go, with what it said; or who makes which call, if they differ."""
    if decision.apart:
        return f"ranks that vote together are in different calls: {decision.apart}; they run without a warmup"
    return "; ".join(f"rank {rank}: {reason}" for rank, _, reason in decision.reasons if reason)
