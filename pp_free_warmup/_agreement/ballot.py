"""One call's votes: who votes where, and how the one decision reaches everybody."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from pp_free_warmup._agreement.halls import Hall, inner, timeout_of
from pp_free_warmup._agreement.mailbox import Mailbox, StoreLost, store_host
from pp_free_warmup._agreement.signs import Heart, Signs
from pp_free_warmup._agreement.watcher import Watcher
from pp_free_warmup._agreement.words import Decision, Reason, Tally, Word, decide
from pp_free_warmup.errors import RankSilent

T = TypeVar("T")


class Ballot:
    """All votes of one schedule call.

    Every rank of the stage says a word; the first rank of the stage's group puts them together and
    speaks for the stage in the pipeline's group, whose first rank decides. The decision is one key
    of the store, and the first to write it wins: usually that first rank, but whoever fails writes
    the failure at once, and whoever waits too long for a silent rank writes that. Everyone obeys
    what is stored, so no two ranks can part ways. Nobody ever waits inside the store.

    Args:
        pipeline: The pipeline's process group.
        stage: The groups that together span this stage's ranks, walked in this order: usually one
            (tensor x data x context), else tensor and then data x context.
        timeout: Seconds without a sign of life after which a rank counts as lost; None takes the
            pipeline group's own timeout.

    Example:
        A skipped call, on every rank of a pipeline of two stages::

            ballot = Ballot(pipeline_group, (stage_group,))
            with ballot.watching():
                decision = ballot.vote(Word.GO)
    """

    def __init__(self, pipeline: Any, stage: Sequence[Any], timeout: float | None = None) -> None:
        self._rank: int = dist.get_rank()
        self._mailbox = Mailbox()
        groups = [group for group in map(inner, stage) if group.size() > 1] + [inner(pipeline)]
        self._halls: list[Hall] = []
        for group in groups:
            if all(hall.leads for hall in self._halls):
                self._halls.append(Hall(group, self._mailbox, self._rank))
        self._level = len(self._halls) - 1
        self._speaks_for_stage = len(self._halls) == len(groups)
        self._box = self._halls[-1].place() if self._speaks_for_stage else None
        self._timeout = timeout_of(inner(pipeline)) if timeout is None else timeout
        ranks = 1
        for group in groups:
            ranks *= group.size()
        self.pace = Pace(self._timeout, ranks)
        self.heart = Heart(self._mailbox, self._rank, self._level, self.pace.sign)
