"""One warmup from its first vote to its report: the steps of a pass, in their order.

    save -> vote -> local pass -> put back -> vote -> channels -> vote -> report

Where lengths vary, the stages tell one another after the pass what they sent, and vote on whether
all run it once more, because some had guessed wrong what they receive. No step knows another; this
module knows them all.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._agreement import FAILURES, Ballot, Call, Decision, Tally, Word
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._channels import ChannelReport, prime
from pp_free_warmup._failures import WENT_ON_COLD, describe, failure, let_go, reasons_of, word_of
from pp_free_warmup._ledger import Page, kind_of, ledger
from pp_free_warmup._options import STRICT, Options
from pp_free_warmup._rehearsal import Rehearsal
from pp_free_warmup._report import NOTICE, StageReport, Stopwatch, WarmupReport, logger, say
from pp_free_warmup._wire import is_wrong, read, text_of, told
from pp_free_warmup.errors import WarmupError

PASS, CHANNELS = "finish its local pass", "open its channels"


class Flow:
    """Prepare one schedule call: warm it, prime it, or find out why not.

    Args:
        call: The call.
        options: What the user chose.
        optimizer: Looked at where ``verify`` asks for it, never stepped.

    Attributes:
        decision: What the vote before the pass decided; None where it did not come to one.
    """

    def __init__(self, call: ScheduleCall, options: Options, optimizer: Any = None) -> None:
        self._call = call
        self._options = options
        self._kind = kind_of(call.forward_only)
        self._stopwatch = Stopwatch()
        model = type(megatron.unwrapped(call.chunks[0])).__name__
        described = Call(self._kind, len(call.chunks), model)
        self._ballot = Ballot(call.groups.pipeline, call.groups.stage, options.timeout, described)
        self._rehearsal = Rehearsal(call, options, optimizer, self._ballot, self._stopwatch, talks=self.speaks)
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
        with self._ballot.watching():
            return self._steps()

    def data_iterator(self) -> Any:
        """Return what the real schedule reads from: the caller's iterators, fetched batches first."""
        return self._rehearsal.batches.for_schedule()

    def _steps(self) -> WarmupReport:
        trouble, began, ended = self._attempt()
        if ended.word is Word.AGAIN:
            trouble, began, ended = self._attempt()
        self.decision = began
        if ended.word in FAILURES:
            return self._ended_badly(trouble, ended)
        if began.word not in (Word.GO, Word.WARM):
            return WarmupReport("skipped", self._kind, reason=reasons_of(began))
        return self._open_channels(began)

    def _attempt(self) -> tuple[BaseException | None, Decision, Decision]:
        """Rehearse once; return what went wrong here, and what was decided before the pass and after it."""
        trouble = self._rehearsal.run()
        if trouble is not None:
            logger.info("pp_free_warmup: this rank's part of the warmup failed: %s", describe(trouble))
        began = self._rehearsal.decision
        if began is None:  # the guards could not save: say so where the others wait for the first vote
            began = self._say(trouble)
        if began.word in (Word.FAILED, Word.STOP) or began.is_off_everywhere:
            return trouble, began, began
        return trouble, began, self._put_back(trouble, began)  # some rank has saved, and has put back, or could not

    def _say(self, trouble: BaseException | None, *, strictly: bool = True) -> Decision:
        """Vote on what became of this rank: fine, failed and as before, or failed and not."""
        word = word_of(trouble)
        if word is Word.COLD and strictly and self._options.strictness:
            word = Word.FAILED
        return self._ballot.vote(word, describe(trouble), {**self._stopwatch.seconds, **self._options.strictness})

    def _put_back(self, trouble: BaseException | None, decision: Decision) -> Decision:
        """Wait until every rank has put its state back; find out whether to run the pass once more.

        A second pass is not judged by its shapes: where it ran, whatever it compiled for a wrong one
        is lost time and nothing else.
        """
        guessed = self._call.config.variable_seq_lengths and decision.word is Word.GO and self._rehearsal.passes == 1
        if not guessed:
            return self._say(trouble)
        self._ballot.leave(text_of(self._rehearsal.neighbours.passages))
        ended = self._say(trouble, strictly=False)
        if ended.word not in (Word.GO, Word.COLD):
            return ended
        return self._compare(trouble)

    def _compare(self, trouble: BaseException | None) -> Decision:
        """Compare what each chunk took with what it is sent; agree on another pass where that may help."""
        notes = [read(note) for note in self._ballot.left_by_pipeline()]
        rank = self._call.groups.pipeline.rank()
        sent = told(notes)[rank]
        if any(map(is_wrong, notes[rank], sent)):
            reason = f"took {notes[rank]}, is sent {sent}: {describe(trouble)}"
            decision = self._ballot.vote(Word.AGAIN, reason, self._options.strictness)
        else:
            decision = self._say(trouble)
        if decision.word is Word.AGAIN:
            self._rehearsal.prepare_another(sent)
            if trouble is not None:
                let_go(trouble)
        return decision

    def _open_channels(self, decision: Decision) -> WarmupReport:
        opened, trouble = ChannelReport(), None
        try:
            if self._options.channels is not None:
                self._ballot.tell("opening channels")
                with self._stopwatch.measure("channels"):
                    opened = prime(self._call, everything=self._options.channels == "all")
        except Exception as error:  # noqa: BLE001 - told to the other ranks, then raised or reported
            trouble = error
        stages = self._say(trouble)
        if stages.word is not Word.GO:
            return self._ended_badly(trouble, stages, CHANNELS)
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
            transfers_in_pass=len(self._rehearsal.transfers),
            passes=self._rehearsal.passes,
            memory=dict(self._call.taken),
            stages=tuple(map(_stage_report, range(len(stages.stages)), stages.stages)),
        )
        if self.speaks:
            say(report.headline(), NOTICE if is_news else logging.DEBUG)
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
            say(WENT_ON_COLD % (self._kind, reasons_of(ended)))
        passes, seconds = self._rehearsal.passes, dict(self._stopwatch.seconds)
        reason, total = reasons_of(ended), self._stopwatch.total
        return WarmupReport("failed", self._kind, reason=reason, seconds=seconds, total_s=total, passes=passes)

    def _raise(self, trouble: BaseException | None, decision: Decision, step: str) -> None:
        if isinstance(trouble, WarmupError) or (trouble is not None and not isinstance(trouble, Exception)):
            raise trouble
        fetched, exhausted = self._rehearsal.batches.fetched, self._rehearsal.batches.exhausted
        data = f" {fetched} batch(es) fetched on this rank are consumed." if fetched else ""
        data = " A data iterator had no batch for it." if exhausted else data
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
        quickest={phase: spread.least_rank for phase, spread in phases.items()},
        slowest={phase: spread.most_rank for phase, spread in phases.items()},
    )
