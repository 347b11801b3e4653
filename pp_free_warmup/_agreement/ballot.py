"""One call's votes: who votes where, and how one decision reaches everybody."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._agreement.calls import Call
from pp_free_warmup._agreement.halls import Hall, timeout_of
from pp_free_warmup._agreement.lost import rank_silent, store_answers, store_lost
from pp_free_warmup._agreement.mailbox import Mailbox, StoreLost
from pp_free_warmup._agreement.meeting import Meeting
from pp_free_warmup._agreement.pace import Pace
from pp_free_warmup._agreement.signs import Heart, gone
from pp_free_warmup._agreement.watcher import Watcher
from pp_free_warmup._agreement.words import FAILURES, Decision, Tally, Word
from pp_free_warmup._report import say
from pp_free_warmup.errors import WarmupError

PROGRESS_SECONDS = 30.0
# What gloo and NCCL say when the other side of a transfer is gone.
BROKEN_OFF = re.compile("connection|broken pipe|timed out|timeout|remote process", re.IGNORECASE)


class Ballot:
    """All votes of one schedule call.

    Every rank of a stage says a word; the first rank of the stage's group puts them together and
    speaks for the stage in the pipeline's group, whose first rank decides. The decision is one key
    of the store, and the first to write it wins: usually that first rank, but a rank that failed
    writes its failure at once, and a rank that waited too long for a silent one writes that.
    Everyone obeys what is stored, so no two ranks can part ways. Nobody ever waits inside the store.

    Args:
        pipeline: The pipeline's process group.
        stage: The groups that together span this stage's ranks, walked in this order: usually one
            (tensor x data x context), else tensor and then data x context.
        timeout: Seconds without a sign of life after which a rank counts as lost; None takes the
            pipeline group's own timeout.
        call: Which call this rank is in, told with every word; None tells nothing.

    Raises:
        UnsupportedSetup: The process groups have no store.
        RankSilent: The store does not answer.

    Example:
        On every rank::

            ballot = Ballot(pipeline_group, (stage_group,), timeout=60)
            with ballot.watching():
                if ballot.vote(Word.GO).word is Word.GO:
                    seconds = run_pass()
                    ballot.vote(Word.GO, detail={"pass": seconds})
    """

    def __init__(
        self, pipeline: Any, stage: Sequence[Any], timeout: float | None = None, call: Call | None = None
    ) -> None:
        rank = dist.get_rank()
        self._call = call
        with store_answers():
            self._mailbox = Mailbox.of_world()
        groups = [megatron.inner_group(group) for group in (*stage, pipeline) if group is pipeline or group.size() > 1]
        self._timeout = timeout_of(groups[-1]) if timeout is None else timeout
        self._pace = Pace(self._timeout, math.prod(group.size() for group in groups))
        self._peers = sorted({rank for group in groups for rank in dist.get_process_group_ranks(group)} - {rank})
        with store_answers():
            halls = _halls(groups, self._mailbox, rank)
        self._heart = Heart(self._mailbox, rank, self._pace.sign)
        self._meeting = Meeting(halls, len(groups), self._mailbox, self._heart, self._pace, self._timeout, rank)
        self._watcher: Watcher | None = None
        self._heard: Decision | None = None
        self._failed = False
        self._rank, self._pipeline = rank, Hall(groups[-1], self._mailbox, rank)
        self._note = False

    def vote(self, word: Word, reason: str = "", detail: Mapping[str, float] | None = None) -> Decision:
        """Say a word and return what all ranks of the call do.

        Args:
            word: What this rank says; `Word.FAILED` decides for all at once.
            reason: Why, in one sentence; named to the others.
            detail: Numbers to carry along, such as phase seconds; summed up per stage.

        Returns:
            The same decision on every rank. A failure is returned, not raised.

        Raises:
            RankSilent: A rank gave no sign of life for longer than the timeout, or the store is gone.
        """
        try:
            decision = self._over or self._held(word, reason, detail)
        except StoreLost as lost:
            heard = self._heard if self._watcher is None else self._watcher.heard
            if heard is None:
                raise store_lost(lost) from lost
            decision = heard
        self._failed = decision.word in (Word.FAILED, Word.STOP)
        if self._failed:
            self.linger()
        if decision.silent:
            raise rank_silent(decision.silent, self._timeout)
        return decision

    @property
    def _over(self) -> Decision | None:
        """The failure of a vote that an exception ended on this rank: there are no more votes in this call."""
        ended = self._meeting.broken_off
        return ended if ended is not None and ended.word is Word.FAILED else None

    def _held(self, word: Word, reason: str, detail: Mapping[str, float] | None) -> Decision:
        if word in FAILURES and BROKEN_OFF.search(reason):
            gone = self._gone()
            word, reason = (Word.FAILED if gone else word), reason + gone
        decision = self._meeting.hold(Tally.of(dist.get_rank(), word, reason, detail, self._call))
        if self._watcher is None:
            self._take_sign_away()
        return decision

    def tell(self, phase: str, progress: int = 0) -> None:
        """Note what this rank does now, and show it to the others; cheap, and no wait for anybody.

        Args:
            phase: A few words, such as ``"forward of chunk 0"``.
            progress: Any number that changes as the phase gets on.
        """
        self._heart.tell(phase, progress)
        if self._watcher is None:  # a sign that nobody takes away again would outlive the call
            return
        with suppress(StoreLost):  # the next vote says so
            self._heart.beat(self._pace.news)

    def leave(self, note: str) -> None:
        """Leave a note for the ranks of this one's pipeline, who read it after the coming vote.

        The next one overwrites it, so there has to be another vote between reading and that; the last
        one is taken away at the end of `watching`.
        """
        self._mailbox.write(self._pipeline.note_of(self._rank), note)
        self._note = True

    def left_by_pipeline(self) -> list[str]:
        """Return the notes of this rank's pipeline, in its order; every rank of it must have left one."""
        notes = [self._mailbox.peek(self._pipeline.note_of(rank)) for rank in self._pipeline.ranks]
        return [note for note in notes if note is not None]

    def linger(self) -> None:
        """Wait until every rank that lives has seen the decision, before this one raises and may exit.

        The store may live in this very process, and a launcher ends all ranks when one exits.
        """
        time.sleep(self._pace.linger)

    @contextmanager
    def watching(self, on_progress: Callable[[str], None] = say, every: float = PROGRESS_SECONDS) -> Iterator[None]:
        """Show signs of life from a thread during the block, and log other ranks' failures as they happen.

        An error that leaves the block is told to the others, unless a vote has ended in failure.

        Args:
            on_progress: Called with one line about all stages; on the pipeline's first rank only.
            every: Seconds between two such lines.
        """
        progress = self._meeting.progress if self._meeting.chairs else None
        watcher = Watcher(self._pace.sign, self._heart.beat, self._meeting.early, progress, on_progress, every)
        self._watcher = watcher
        watcher.start()
        try:
            with store_answers():
                self._heart.beat()
            yield
        except WarmupError:
            raise
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")
            raise
        finally:
            watcher.stop()
            self._watcher, self._heard = None, watcher.heard
            self._take_sign_away()

    def _give_up(self, reason: str) -> None:
        """Let the others find this rank's failure at the vote that it will not take part in."""
        if self._failed:
            return
        if self._over is not None:
            self.linger()
            return
        try:
            self._meeting.give_up(Tally.of(dist.get_rank(), Word.FAILED, reason))
        except StoreLost as lost:  # the error that ends the block has more to say than this
            say(f"pp_free_warmup: the store of the process groups is lost: {lost}")

    def _gone(self) -> str:
        """Say which peers stopped giving signs of life, unless one has told why it failed; takes a few seconds.

        A transfer that broke off says that a peer is gone, but not which.
        """
        if self._meeting.early() is not None:
            return ""
        return "".join(f"; rank {rank} is lost" for rank in gone(self._mailbox, self._peers, 3 * self._pace.sign))

    def _take_sign_away(self) -> None:
        try:
            self._heart.stop()
            if self._note:
                self._note = False
                self._mailbox.forget([self._pipeline.note_of(self._rank)])
        except StoreLost as lost:  # whatever ends the block has more to say than this
            say(f"pp_free_warmup: the store of the process groups is lost: {lost}")


def _halls(groups: Sequence[Any], mailbox: Mailbox, rank: int) -> list[Hall]:
    """Return the groups in which this rank has a voice: each next one as long as it leads all before.

    In the others it leaves a note, for those who would wait there for its word in vain.
    """
    voiced: list[Hall] = []
    for hall in [Hall(group, mailbox, rank) for group in groups]:
        if all(lower.leads for lower in voiced):
            voiced.append(hall)
        else:
            mailbox.write(hall.absence_of(rank), "yes")
    return voiced
