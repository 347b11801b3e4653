"""How a vote runs: up through the groups by their first ranks, and one decision for all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from pp_free_warmup._agreement.halls import Hall, Place
from pp_free_warmup._agreement.mailbox import Mailbox, StoreLost
from pp_free_warmup._agreement.pace import Pace
from pp_free_warmup._agreement.signs import Heart, Signs, read_phases
from pp_free_warmup._agreement.words import Decision, Reason, Tally, Word, decide

T = TypeVar("T")
WAITING, WORKING = "waiting for other ranks", "between two votes"


class Meeting:
    """The votes of one call, as one rank takes part in them.

    The decision lives in the *box*: a place of the last group, which only that group's members know
    by themselves. The first rank of every other group announces it there, and does not speak for the
    group elsewhere before it did. Until it did, a member that finds it silent writes so in place of
    the announcement; whichever is written first holds. So a decision to go never overtakes a
    member's verdict that its leader is lost.

    Args:
        halls: The groups in which this rank has a voice: its own stage's, and each next one as long
            as it comes first in all before.
        hops: How many groups there are from a stage's ranks up to the pipeline.
        mailbox: The store.
        heart: This rank's sign of life.
        pace: How often to ask.
        timeout: Seconds without a sign of life after which a rank counts as lost.
        rank: This process's global rank.

    Attributes:
        broken_off: The decision of a vote that an exception ended on this rank, where there is one.
    """

    def __init__(
        self, halls: Sequence[Hall], hops: int, mailbox: Mailbox, heart: Heart, pace: Pace, timeout: float, rank: int
    ) -> None:
        self._halls = halls
        self._top = halls[-1]
        self._in_last_group = len(halls) == hops
        self._mailbox = mailbox
        self._heart = heart
        self._pace = pace
        self._timeout = timeout
        self._rank = rank
        self._box: Place | None = None
        self.broken_off: Decision | None = None
        self._signs = Signs(mailbox, timeout, pace.sign)

    @property
    def chairs(self) -> bool:
        """True on the one rank that decides where all have spoken."""
        return self._in_last_group and self._top.leads

    def hold(self, mine: Tally) -> Decision:
        """Say *mine* and return the decision."""
        self._heart.tell(WAITING, votes=[hall.place.mark for hall in self._halls])
        self._forget_the_vote_before_last()
        self._signs = Signs(self._mailbox, self._timeout, self._pace.sign)
        try:
            self._begin(mine)
            found = self._speak_up()
            return found if found is not None else self._until(self._decision, self._awaited_above)
        except StoreLost:
            raise
        except BaseException as error:  # an interrupt, or a signal's handler that raised
            said = Tally.of(self._rank, Word.FAILED, f"{type(error).__name__}: {error}")
            self._settle(Decision(Word.FAILED, said.reasons))
            self.broken_off = self._decision()
            raise
        finally:
            self._rise()
            self._heart.tell(WORKING)

    def give_up(self, mine: Tally) -> None:
        """Say *mine*, a failure, and do not stay for the decision."""
        self._begin(mine)
        self._rise()

    def early(self) -> Decision | None:
        """Return the decision of the current or coming vote if there is one already."""
        text = None if self._box is None else self._mailbox.peek(self._box.key("decision"))
        return None if text is None else Decision.read(text)

    def progress(self) -> str:
        """Say what each stage does now; for the rank that `chairs`."""
        phases = read_phases(self._mailbox, self._top.ranks)
        stages = "; ".join(f"stage {stage}: {phases[rank]}" for stage, rank in enumerate(self._top.ranks))
        return f"pp_free_warmup: {stages}"

    def _begin(self, mine: Tally) -> None:
        if self._in_last_group and self._box is None:
            self._announce(self._top.place)
        self._say(0, mine)
        if Word.FAILED in mine.words and self._box is not None:
            self._settle(Decision(Word.FAILED, mine.reasons))

    def _rise(self) -> None:
        for hall in self._halls:
            hall.rise()
        if self._box is not None:
            self._box = self._box.later(1)

    def _speak_up(self) -> Decision | None:
        """Collect what the groups say that this rank leads, and say it in the next one."""
        for level, hall in enumerate(self._halls):
            if not hall.leads:
                return None
            found = self._until(partial(self._everyone_said, hall), partial(self._awaited_in, hall))
            if isinstance(found, Decision):
                return found
            if level + 1 < len(self._halls):
                self._say(level + 1, Tally.together(self._rank, found))
            else:
                self._settle(decide(found))
        return None

    def _say(self, level: int, tally: Tally) -> None:
        self._mailbox.append(self._halls[level].place.key("words"), tally.line())

    def _heard(self, hall: Hall) -> dict[int, Tally]:
        lines = (self._mailbox.peek(hall.place.key("words")) or "").splitlines()
        tallies = (Tally.read(json.loads(line)) for line in lines)
        return {tally.speaker: tally for tally in tallies}

    def _everyone_said(self, hall: Hall) -> list[Tally] | None:
        if self._box is None:
            return None
        heard = self._heard(hall)
        return [heard[rank] for rank in hall.ranks] if len(heard) == len(hall.ranks) else None

    def _awaited_in(self, hall: Hall) -> dict[int, Hall]:
        """Return who is still to speak, and in which hall."""
        heard = self._heard(hall)
        missing = {rank: hall for rank in hall.ranks if rank not in heard}
        return missing if self._box is not None else {**missing, **self._awaited_above()}

    def _awaited_above(self) -> dict[int, Hall]:
        return {} if self._top.leads else {self._top.ranks[0]: self._top}

    def _until(self, ready: Callable[[], T | None], awaited: Callable[[], Mapping[int, Hall]]) -> T | Decision:
        """Ask until there is a decision or *ready* returns something, whichever comes first."""
        for pause in self._pace.pauses():
            decision = self._decision()
            if decision is not None:
                return decision
            found = ready()
            if found is not None:
                return found
            self._heart.move()
            self._heart.beat()
            if self._signs.due:
                self._judge(awaited())
            time.sleep(pause)
        raise AssertionError("pauses() never ends")

    def _judge(self, awaited: Mapping[int, Hall]) -> None:
        """Decide for all if an awaited rank is silent, or has no voice where it is awaited."""
        self._signs.look({rank: hall.place.mark for rank, hall in awaited.items()})
        silent = self._signs.silent(awaited)
        misplaced = [rank for rank, hall in awaited.items() if self._mailbox.peek(hall.absence_of(rank)) is not None]
        if silent:
            reasons = tuple(Reason(rank, Word.FAILED, text) for rank, text in silent.items())
            self._settle(Decision(Word.FAILED, reasons, silent="; ".join(silent.values())))
        elif misplaced:
            self._settle(Decision(Word.REFUSE, tuple(Reason(rank, Word.REFUSE, MISPLACED) for rank in misplaced)))

    def _decision(self) -> Decision | None:
        if self._box is None:
            said = self._mailbox.peek(self._top.place.key("box"))
            if said is None:
                return None
            box = _read_box(said)
            if box is None:
                self._pass_down(said)
                return Decision.read(said)
            self._announce(box)
        return self.early()

    def _announce(self, box: Place) -> None:
        """Tell the groups that this rank leads below its last one where the decision will be."""
        self._box = box
        for earlier in self._pass_down(json.dumps(list(box))):
            self._mailbox.write_first(box.key("decision"), earlier)

    def _pass_down(self, text: str) -> Iterable[str]:
        """Write *text* as the box of the groups below; return the decisions that were there first."""
        said = [self._mailbox.write_first(hall.place.key("box"), text) for hall in self._halls[:-1]]
        return [earlier for earlier in said if earlier != text]

    def _settle(self, decision: Decision) -> None:
        """Write the decision, unless there is one already."""
        key = self._top.place.key("box") if self._box is None else self._box.key("decision")
        self._mailbox.write_first(key, decision.text())

    def _forget_the_vote_before_last(self) -> None:
        for hall in self._halls:
            if hall.leads and hall.place.number >= 2:
                past = hall.place.later(-2)
                self._mailbox.forget([past.key(what) for what in ("words", "box", "decision")])


MISPLACED = (
    "the stages' groups do not list their ranks alike: this rank shares a pipeline with a rank that comes first in "
    "its stage's group, but does not come first in its own"
)


def _read_box(said: str) -> Place | None:
    """Read an announced place; None if a decision was written in place of it."""
    found = json.loads(said)
    return Place(*found) if isinstance(found, list) else None
