"""One local pass between save and put-back, which all ranks of a call run or none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import _preflight
from pp_free_warmup._activations import Neighbours
from pp_free_warmup._agreement import Ballot, Decision, Word
from pp_free_warmup._batches import Batches
from pp_free_warmup._call import ScheduleCall, refuse_mismatch
from pp_free_warmup._ledger import kind_of, ledger
from pp_free_warmup._local_pass import run_local_pass
from pp_free_warmup._options import Options
from pp_free_warmup._origin import say_once
from pp_free_warmup._report import Stopwatch, say
from pp_free_warmup._verify import verified
from pp_free_warmup._wire import Load
from pp_free_warmup.errors import RankSilent
from pp_free_warmup.guards import guarded

COMPILING = "pp_free_warmup: {stages} stages compile for their first {kind} call at the same time: compiling, not hung"
DRAWN_IN_ANOTHER_ORDER = (
    "pp_free_warmup: rank %d has %d data iterators that drew random numbers for their first batches; if they draw "
    "for every batch, a run without the warmup draws in another order, and its batches differ from this run's"
)


class Rehearsal:
    """Save, vote, run the pass if all go, put back; twice if the first had wrong activations.

    Args:
        call: The call.
        options: What the user chose.
        optimizer: Looked at where ``verify`` asks for it.
        ballot: Where the ranks vote.
        stopwatch: Receives the seconds of each phase.
        talks: Whether this rank writes to the log.

    Attributes:
        batches: What the passes read, and the real schedule after them.
        neighbours: What stood in for the stages next to this one.
        decision: What the last vote before a pass decided; None where this rank did not come to it.
        passes: How many passes were begun.
        transfers: One entry for each transfer between stages in a pass.
    """

    def __init__(
        self, call: ScheduleCall, options: Options, optimizer: Any, ballot: Ballot, stopwatch: Stopwatch, *, talks: bool
    ) -> None:
        self._call = call
        self._options = options
        self._optimizer = optimizer
        self._ballot = ballot
        self._stopwatch = stopwatch
        self._talks = talks
        self.batches = Batches(call)
        self.neighbours = Neighbours(call, options.activations)
        self.decision: Decision | None = None
        self.passes = 0
        self.transfers: list[None] = []

    def run(self) -> BaseException | None:
        """Go through it once; return what went wrong, for the vote that follows.

        Raises:
            RankSilent: A rank gave no sign of life; this rank's state was put back.
        """
        measure, self.decision = self._stopwatch.measure, None
        trouble: Exception | None = None
        try:
            word, reason = self._own_word()
            with ExitStack() as kept:
                if word in (Word.GO, Word.WARM):
                    self._save(kept)
                with measure("agree"):
                    self.decision = self._ballot.vote(word, reason, self._options.strictness)
                if self.decision.word is Word.GO:
                    trouble = self._pass()
                with measure("restore"):
                    kept.close()
        except RankSilent:
            raise
        except BaseException as error:  # noqa: BLE001 - told to the other ranks, then raised or reported
            error.__context__ = error.__context__ or trouble
            return error
        return trouble

    def prepare_another(self, sent: Sequence[Load | None]) -> None:
        """Have the next pass begin with the same batches, and with what the chunks are really sent."""
        self.neighbours.learn(sent)

    def _own_word(self) -> tuple[Word, str]:
        if self.passes:  # all ranks have agreed on another one
            return Word.GO, ""
        if not self._options.is_on():
            return Word.OFF, "switched off"
        if self._call.num_microbatches == 0:
            return Word.IDLE, "the call has no microbatches"
        refuse_mismatch(self._call)
        refused = _preflight.refusal(self._call)
        if refused is not None:
            return Word.REFUSE, refused.told
        page = ledger.page(self._call.chunks[0], kind_of(self._call.forward_only))
        return (Word.WARM if page is not None and page.warm else Word.GO), ""

    def _save(self, kept: ExitStack) -> None:
        """Enter everything that puts back, or nothing: what raises here has undone what was entered before it."""
        if self._options.is_verified():
            kept.enter_context(verified(self._call, self._optimizer, self._stopwatch))
        with self._stopwatch.measure("save"):
            kept.enter_context(guarded(self._call, self._options.extra_guards))
            kept.enter_context(self.batches.rewound())

    def _pass(self) -> Exception | None:
        """Run the pass; return its error, for only what is raised while putting back leaves the state unknown."""
        if self._talks and not self.passes:
            say_once(self._call.schedule)
            stages, kind = self._call.groups.pipeline.size(), kind_of(self._call.forward_only)
            say(COMPILING.format(stages=stages, kind=kind))
        self.passes += 1
        try:
            with self._stopwatch.measure("pass"), ledger.passing(), megatron.transfers_counted() as transfers:
                self.transfers = transfers
                run_local_pass(self._call, self.batches, self.neighbours, self._stopwatch, self._ballot.tell)
        except Exception as error:  # noqa: BLE001 - told to the other ranks, then raised or reported
            return error
        if self.batches.drawing > 1:
            say(DRAWN_IN_ANOTHER_ORDER % (torch.distributed.get_rank(), self.batches.drawing))
        return None
