"""One warmup from its first vote to its report: the steps of a pass, in their order.

    save -> vote -> local pass -> put back -> vote -> channels -> vote -> report

Where lengths vary, the stages tell one another after the pass what they sent, and vote on whether
those that had guessed wrong run it once more. No step knows another; this module knows them all.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import _preflight
from pp_free_warmup._agreement import Ballot, Decision, Tally, Word
from pp_free_warmup._batches import Batches
from pp_free_warmup._call import ScheduleCall, refuse_mismatch
from pp_free_warmup._channels import ChannelReport, prime
from pp_free_warmup._failures import WENT_ON_COLD, describe, failure, let_go, reasons_of, word_of
from pp_free_warmup._ledger import Page, kind_of, ledger
from pp_free_warmup._local_pass import run_local_pass
from pp_free_warmup._options import Options
from pp_free_warmup._report import StageReport, Stopwatch, WarmupReport, logger
from pp_free_warmup._verify import verified
from pp_free_warmup.errors import RankSilent, WarmupError
from pp_free_warmup.guards import guarded

STRICT = "strict"
PASS, CHANNELS = "finish its local pass", "open its channels"
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

    Attributes:
        decision: What the vote before the pass decided.
    """

    def __init__(self, call: ScheduleCall, options: Options, optimizer: Any = None) -> None:
        self._call = call
        self._optimizer = optimizer
        self._options = options
        self._kind = kind_of(call.forward_only)
        self._stopwatch = Stopwatch()
        self._batches = Batches(call)
        self._ballot = Ballot(call.groups.pipeline, call.groups.stage, options.timeout)
        self._transfers: list[None] = []
        self.decision: Decision | None = None

    @property
    def speaks(self) -> bool:
        """True on the one rank of this call that writes to the log: first stage, first rank."""
        return speaks_for(self._call)

    def run(self) -> WarmupReport:
        """Go through the steps.

        Returns:
            What was done; ``outcome`` is ``"skipped"`` where some rank could or would not, and
            ``"failed"`` where one failed, all are as before, and the call can go on without a warmup.

        Raises:
            WarmupFailed: A rank failed, and the call must not go on; this rank's state was put back.
            RestoreFailed: This rank's state could not be put back.
        """
        with self._ballot.watching(logger.warning):
            return self._steps()

    def _steps(self) -> WarmupReport:
        trouble = self._save_and_pass()
        decision = self.decision
        if decision is None:  # the guards could not save: say so where the others wait for the first vote
            decision = self.decision = self._say(trouble)
        if decision.word in (Word.FAILED, Word.STOP):
            self._raise(trouble, decision, PASS)
        if not decision.is_off_everywhere:  # some rank has saved, and has put back by now, or could not
            ended = self._say(trouble)
            if ended.word is not Word.GO:
                return self._ended_badly(trouble, ended)
        if decision.word not in (Word.GO, Word.WARM):
            return WarmupReport("skipped", self._kind, reason=reasons_of(decision))
        return self._open_channels(decision)

    def data_iterator(self) -> Any:
        """Return what the real schedule reads from: the caller's iterators, fetched batches first."""
        return self._batches.for_schedule()

    def _say(self, trouble: BaseException | None) -> Decision:
        """Vote on what became of this rank: fine, failed and as before, or failed and not."""
        word = word_of(trouble)
        if word is Word.COLD and self._options.on_failure == "raise":
            word = Word.FAILED
        return self._ballot.vote(word, describe(trouble), {**self._stopwatch.seconds, **self._strictness()})

    def _strictness(self) -> dict[str, float]:
        """Return what tells the others that this rank wants a failure raised: one is enough for all."""
        return {STRICT: 1.0} if self._options.on_failure == "raise" else {}

    def _own_word(self) -> tuple[Word, str]:
        if not self._options.is_on():
            return Word.OFF, "switched off"
        refuse_mismatch(self._call)
        refused = _preflight.refusal(self._call)
        if refused is not None:
            return Word.REFUSE, refused.told
        page = ledger.page(self._call.chunks[0], self._kind)
        return (Word.WARM if page is not None and page.warm else Word.GO), ""

    def _save_and_pass(self) -> BaseException | None:
        """Save, take the first vote, run the pass if all go, put back; return what went wrong."""
        measure = self._stopwatch.measure
        trouble: Exception | None = None
        try:
            word, reason = self._own_word()
            with ExitStack() as kept:
                if word in (Word.GO, Word.WARM):
                    self._save(kept)
                with measure("agree"):
                    self.decision = self._ballot.vote(word, reason, self._strictness())
                if self.decision.word is Word.GO:
                    trouble = self._pass()
                with measure("restore"):
                    kept.close()
        except RankSilent:
            raise
        except BaseException as error:  # noqa: BLE001 - told to the other ranks, then raised by run()
            error.__context__ = error.__context__ or trouble
            return error
        return trouble

    def _save(self, kept: ExitStack) -> None:
        """Enter everything that puts back, or nothing: what raises here has undone what was entered before it."""
        if self._options.is_verified():
            kept.enter_context(verified(self._call, self._optimizer, self._stopwatch))
        with self._stopwatch.measure("save"):
            kept.enter_context(guarded(self._call, self._options.extra_guards))
            kept.enter_context(self._batches.rewound())

    def _pass(self) -> Exception | None:
        """Run the pass; return its error, for only what is raised while putting back leaves the state unknown."""
        if self.speaks:
            stages = self._call.groups.pipeline.size()
            logger.warning(
                "pp_free_warmup: %d stages compile for their first %s call at the same time: compiling, not hung",
                stages,
                self._kind,
            )
        try:
            with self._stopwatch.measure("pass"), ledger.passing(), megatron.transfers_counted() as self._transfers:
                run_local_pass(self._call, self._batches, self._stopwatch, self._ballot.tell)
        except Exception as error:  # noqa: BLE001 - told to the other ranks, then raised or reported
            return error
        if self._batches.drawing > 1:
            logger.warning(DRAWN_IN_ANOTHER_ORDER, torch.distributed.get_rank(), self._batches.drawing)
        return None

    def _open_channels(self, decision: Decision) -> WarmupReport:
        opened, trouble = ChannelReport(), None
        try:
            if self._options.channels is not None:
                self._ballot.tell("opening channels")
                with self._stopwatch.measure("channels"):
                    opened = prime(self._call, everything=self._options.channels == "all")
        except Exception as error:  # noqa: BLE001 - told to the other ranks, and raised on all of them
            trouble = error
        stages = self._say(trouble)
        if stages.word is not Word.GO:
            return self._ended_badly(trouble, stages, CHANNELS)
        self.settle(Page(warm=True, generation=weakref.ref(megatron.generation_of(self._call.keywords))))
        report = WarmupReport(
            outcome="warmed" if decision.word is Word.GO else "primed",
            kind=self._kind,
            seconds=dict(self._stopwatch.seconds),
            total_s=self._stopwatch.total,
            channels=dict(opened.seconds),
            opened=opened.opened,
            transfers_in_pass=len(self._transfers),
            stages=tuple(map(_stage_report, range(len(stages.stages)), stages.stages)),
        )
        if self.speaks:
            logger.warning("%s", report.headline())
        return report

    def settle(self, page: Page) -> None:
        """Write this call's kind into the ledger, under both faces of its first chunk."""
        first = self._call.chunks[0]
        ledger.write((first, megatron.unwrapped(first)), self._kind, page)

    def _ended_badly(self, trouble: BaseException | None, ended: Decision, step: str = PASS) -> WarmupReport:
        """Go on without a warmup if every rank can and none objects, else raise on all of them.

        A channel that one rank opened and another did not may hold a probe, which the real step would
        take for an activation: channels must have failed on all ranks.
        """
        halfway = step is CHANNELS and any(set(stage.words) != {Word.COLD} for stage in ended.stages)
        strict = any(STRICT in stage.detail for stage in ended.stages)
        if ended.word is Word.COLD and (halfway or strict):
            self._ballot.linger()
            ended = replace(ended, word=Word.STOP if halfway else Word.FAILED)
        if ended.word is not Word.COLD:
            self._raise(trouble, ended, step)
        if trouble is not None:
            logger.info("pp_free_warmup: what failed in the warmup on this rank:", exc_info=trouble)
            let_go(trouble)
        if self.speaks:
            logger.warning(WENT_ON_COLD, self._kind, reasons_of(ended))
        return WarmupReport("failed", self._kind, reason=reasons_of(ended), total_s=self._stopwatch.total)

    def _raise(self, trouble: BaseException | None, decision: Decision, step: str) -> None:
        if isinstance(trouble, WarmupError) or (trouble is not None and not isinstance(trouble, Exception)):
            raise trouble
        fetched = self._batches.fetched
        data = f" {fetched} batch(es) fetched on this rank are consumed." if fetched else ""
        data = " A data iterator had no batch for it." if self._batches.exhausted else data
        raise failure(decision, data, step) from trouble


def speaks_for(call: ScheduleCall) -> bool:
    """Tell whether this rank is the one that logs for the call."""
    return bool(call.groups.pipeline.rank() == 0 and all(group.rank() == 0 for group in call.groups.stage))


def _stage_report(stage: int, said: Tally) -> StageReport:
    phases = {phase: spread for phase, spread in said.detail.items() if phase != STRICT}
    return StageReport(
        stage=stage,
        ranks=said.ranks,
        least={phase: spread.least for phase, spread in phases.items()},
        most={phase: spread.most for phase, spread in phases.items()},
    )
