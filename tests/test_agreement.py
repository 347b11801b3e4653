"""This call's ranks all go, or none; no decision is split, no wait unbounded, no failure nameless."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from forked import Ending, run_forked

from pp_free_warmup import _preflight
from pp_free_warmup._agreement import Ballot, Call, Decision, Reason, Tally, Word, decide
from pp_free_warmup._agreement.halls import Hall
from pp_free_warmup._agreement.mailbox import Mailbox
from pp_free_warmup._agreement.pace import Pace
from pp_free_warmup._agreement.signs import Heart, Signs, read_phases
from pp_free_warmup.errors import RankSilent, UnsupportedSetup
from pp_free_warmup.testing import ranks

GO, WARM, IDLE, OFF, SKIP = Word.GO, Word.WARM, Word.IDLE, Word.OFF, Word.SKIP
REFUSE, APART, FAILED = Word.REFUSE, Word.APART, Word.FAILED
TRAIN, SCORE = Call("training", 1, "GPTModel"), Call("forward-only", 1, "GPTModel")
LONG = 60.0


def grid(stages: int) -> tuple[dist.ProcessGroup, tuple[dist.ProcessGroup, ...]]:
    """Return this rank's pipeline group, and its stage's in a tuple; ranks count through a stage first."""
    width = dist.get_world_size() // stages
    rows = [dist.new_group(list(range(first, first + width))) for first in range(0, stages * width, width)]
    columns = [dist.new_group(list(range(column, stages * width, width))) for column in range(width)]
    return columns[dist.get_rank() % width], (rows[dist.get_rank() // width],)


# What the words mean


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ([GO, GO], GO),
        ([GO, WARM], GO),
        ([WARM, WARM], WARM),
        ([OFF, OFF], OFF),
        ([OFF, GO], SKIP),
        ([OFF, WARM], SKIP),
        ([SKIP, GO], SKIP),
        ([SKIP, OFF], SKIP),
        ([REFUSE, GO], REFUSE),
        ([REFUSE, OFF], REFUSE),
        ([REFUSE, SKIP], REFUSE),
        ([FAILED, REFUSE], FAILED),
        ([FAILED, WARM], FAILED),
        ([FAILED, IDLE], FAILED),
        ([IDLE, IDLE], IDLE),
        ([IDLE, GO], IDLE),
        ([IDLE, WARM], IDLE),
        ([IDLE, OFF], SKIP),
        ([IDLE, REFUSE], REFUSE),
        ([GO, Word.COLD], Word.COLD),
        ([Word.COLD, REFUSE], Word.COLD),
        ([Word.COLD, Word.STOP], Word.STOP),
        ([Word.STOP, FAILED], FAILED),
        ([GO, Word.AGAIN], Word.AGAIN),
        ([Word.AGAIN, Word.COLD], Word.COLD),
    ],
)
def test_the_gravest_word_decides(said, word):
    """One failure, refusal or skip holds for all; a flag that is off somewhere warms up nowhere."""
    assert decide([Tally.of(rank, one) for rank, one in enumerate(said)]).word is word
    assert decide([Tally.together(0, [Tally.of(rank, one) for rank, one in enumerate(said)])]).word is word


def test_ranks_with_the_flag_off_are_named():
    """Where the flag is on and off, the decision names those that have it off, and nobody else."""
    decision = decide([Tally.of(0, GO), Tally.of(1, OFF, "switched off"), Tally.of(2, GO)])

    assert decision.reasons == (Reason(1, OFF, "switched off"),)


def test_the_gravest_reasons_come_first():
    """A failure is named before a refusal, and lower ranks before higher ones."""
    said = [Tally.of(0, OFF, "off"), Tally.of(1, REFUSE, "b"), Tally.of(2, FAILED, "c"), Tally.of(3, REFUSE, "d")]

    assert [reason.rank for reason in decide(said).reasons] == [2, 1, 3, 0]


def _in_calls(*said: tuple[Word, Call]) -> Decision:
    """Decide with one stage of each pair of ranks."""
    tallies = [Tally.of(rank, word, call=call) for rank, (word, call) in enumerate(said)]
    return decide([Tally.together(first, tallies[first : first + 2]) for first in range(0, len(tallies), 2)])


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ([(GO, TRAIN), (GO, SCORE)], APART),
        ([(GO, TRAIN), (GO, TRAIN), (GO, SCORE), (GO, SCORE)], APART),
        ([(WARM, TRAIN), (GO, SCORE)], APART),
        ([(WARM, TRAIN), (WARM, SCORE)], WARM),
        ([(OFF, TRAIN), (OFF, SCORE)], APART),
        ([(IDLE, SCORE), (GO, TRAIN)], APART),
        ([(REFUSE, TRAIN), (GO, SCORE)], APART),
        ([(FAILED, TRAIN), (GO, SCORE)], FAILED),
        ([(GO, TRAIN), (GO, TRAIN._replace(chunks=2))], APART),
        ([(GO, TRAIN), (GO, TRAIN._replace(model="Critic"))], APART),
        ([(GO, TRAIN), (GO, TRAIN), (GO, TRAIN._replace(model="Head")), (GO, TRAIN._replace(model="Head"))], GO),
    ],
)
def test_ranks_in_different_calls_do_not_warm_up_together(said, word):
    """Kind and chunks are alike everywhere, the model's class within a stage; only warm calls may differ."""
    decision = _in_calls(*said)

    assert decision.word is word
    assert bool(decision.apart) is (word is APART or said[0][0] is FAILED)
    assert decision.kinds == {call.kind for _, call in said}
    assert Decision.read(decision.text()) == decision


def test_who_is_in_which_call_is_named_and_does_not_grow():
    """A thousand ranks in two calls are told as counts with the lowest ranks of each."""
    tallies = [Tally.of(rank, GO, call=SCORE if rank % 2 else TRAIN) for rank in range(1000)]
    decision = decide([Tally.together(0, tallies)])

    assert decision.apart == (
        "a forward-only call of 1 chunk of GPTModel on ranks 1, 3, 5, 7, 9, 11, 13, 15 and 492 more; "
        "a training call of 1 chunk of GPTModel on ranks 0, 2, 4, 6, 8, 10, 12, 14 and 492 more"
    )


def test_a_decision_survives_the_store():
    """What is read equals what was written, reasons and numbers included."""
    decision = decide([Tally.of(3, REFUSE, "no \u00fcse", {"pass": 1.5}), Tally.of(4, GO, detail={"pass": 0.5})])

    assert Decision.read(decision.text()) == decision


def test_a_tally_keeps_the_spread_of_each_number():
    """Of a number that many ranks give, the smallest and largest stay, with the ranks that have them."""
    tally = Tally.together(0, [Tally.of(rank, GO, detail={"pass": seconds}) for rank, seconds in enumerate([3, 9, 1])])

    assert tally.detail == {"pass": (1, 9, 2, 1)}


def test_a_tally_does_not_grow_with_the_ranks():
    """What a stage says to the next group is as long for a thousand ranks as for sixteen."""

    def size(count: int) -> int:
        said = [Tally.of(rank, REFUSE, "as everywhere", {"pass": 1.0}, TRAIN) for rank in range(1000, 1000 + count)]
        return len(Tally.together(1000, said).line())

    assert size(1000) < size(16) + 10


# What the store is asked


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request, tmp_path):
    """A store of each kind that process groups meet through."""
    made = {
        "hash": lambda: dist.PrefixStore("p", dist.HashStore()),
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    return made[request.param]()


def test_asking_for_what_is_not_there_does_not_wait(store):
    """A key without a value reads as None at once, and reading does not make one."""
    mailbox = Mailbox(store)
    began = time.monotonic()

    assert mailbox.peek("nothing") is None
    assert mailbox.peek("nothing") is None
    assert time.monotonic() - began < 1


def test_the_first_writer_wins(store):
    """A second writer gets the first one's value back, through whichever connection."""
    mine, yours = Mailbox(store), Mailbox(store)

    assert mine.write_first("decision", "go") == "go"
    assert yours.write_first("decision", "abort") == "go"
    assert yours.peek("decision") == "go"


def test_lines_are_added_in_order_and_forgotten(store):
    """Lines under one key stay apart; a forgotten key is as if it never was."""
    mailbox = Mailbox(store)
    mailbox.append("words", "one\n")
    mailbox.append("words", "two\n")

    assert (mailbox.peek("words") or "").splitlines() == ["one", "two"]
    mailbox.forget(["words", "never there"])
    assert mailbox.peek("words") is None


# Signs of life


def test_a_rank_that_gives_signs_is_not_silent():
    """Only an unchanged sign makes a rank lost, and the text says what it did last."""
    mailbox = Mailbox(dist.HashStore())
    heart, signs = Heart(mailbox, 7, 0.0), Signs(mailbox, timeout=0.2, period=0.0)
    heart.tell("forward of chunk 0")
    for _ in range(4):
        heart.move()
        heart.beat()
        signs.look({7: 1})
        time.sleep(0.1)
    assert signs.silent([7]) == {}

    time.sleep(0.2)
    signs.look({7: 1})
    assert "rank 7 is lost" in signs.silent([7])[7]
    assert "forward of chunk 0" in signs.silent([7])[7]


def test_a_new_phase_is_shown_at_once_and_not_too_often():
    """News may follow a fresh sign sooner than the next sign would, yet no sooner than asked."""
    mailbox = Mailbox(dist.HashStore())
    heart = Heart(mailbox, 7, 60.0)

    def shown(phase: str, period: float | None) -> str:
        heart.tell(phase)
        heart.beat(period)
        return read_phases(mailbox, [7])[7]

    assert [shown("a", None), shown("b", None), shown("c", 0.0), shown("d", 30.0)] == ["a", "a", "c", "c"]


def test_a_rank_that_lives_and_makes_no_progress_is_named_after_longer():
    """A sign that changes without progress counts as silence after six timeouts."""
    mailbox = Mailbox(dist.HashStore())
    heart, signs = Heart(mailbox, 7, 0.0), Signs(mailbox, timeout=0.1, period=0.0)
    heart.tell("a long kernel")
    began, silent = time.monotonic(), {}
    while not silent and time.monotonic() - began < 5:
        heart.beat()
        signs.look({7: 1})
        silent = signs.silent([7])
        time.sleep(0.02)

    assert time.monotonic() - began >= 0.6
    assert "rank 7 is alive but made no progress" in silent[7]
    assert "a long kernel" in silent[7]


@pytest.mark.parametrize("vote", [1, 2])
def test_who_waits_in_another_vote_does_not_get_on(vote):
    """A rank that waits where it is awaited may wait for others in turn; elsewhere it waits in vain."""
    mailbox = Mailbox(dist.HashStore())
    heart, signs = Heart(mailbox, 7, 0.0), Signs(mailbox, timeout=0.05, period=0.0)
    heart.tell("waiting", votes=[1, 5])
    began, silent = time.monotonic(), {}
    while not silent and time.monotonic() - began < 1:
        heart.move()
        heart.beat()
        signs.look({7: vote})
        silent = signs.silent([7])
        time.sleep(0.02)

    assert bool(silent) is (vote == 2)
    assert vote == 1 or "rank 7 has waited in another vote than this one" in silent[7]


def test_a_rank_that_never_came_is_told_from_a_lost_one():
    """A rank without any sign never came to the call."""
    signs = Signs(Mailbox(dist.HashStore()), timeout=0.0, period=0.0)
    signs.look({3: 1})
    time.sleep(0.01)
    signs.look({3: 1})

    assert "rank 3 never came to this call" in signs.silent([3])[3]


def test_questions_become_rarer_and_scale_with_the_ranks():
    """The first question follows after a millisecond; ten thousand ranks ask less often than ten."""
    few, many = Pace(600, 10), Pace(600, 10_000)
    pauses = few.pauses()

    assert next(pauses) == 0.001
    assert max(next(pauses) for _ in range(50)) == 0.1
    assert few.sign == 1.0
    assert many.sign > 3.0
    assert Pace(2.0, 10).sign == 0.25
    assert (few.news, many.news) == (0.0005, 0.5)


# Votes of real processes


@pytest.mark.ranks
@ranks(4)
def test_all_ranks_read_one_decision() -> None:
    """Two stages of two ranks go, and every rank reads the same numbers of every stage, in order."""
    ballot = Ballot(*grid(2), timeout=LONG)
    with ballot.watching():
        decision = ballot.vote(GO, detail={"pass": float(dist.get_rank())})

    texts = [None] * 4
    dist.all_gather_object(texts, decision.text())
    assert decision.word is GO
    assert [stage.detail["pass"] for stage in decision.stages] == [(0.0, 1.0, 0, 1), (2.0, 3.0, 2, 3)]
    assert len(set(texts)) == 1


@pytest.mark.ranks
@pytest.mark.parametrize("who", range(4))
@ranks(4)
def test_one_refusal_is_everyones(who) -> None:
    """Whichever rank refuses, leader or not, all ranks refuse and know who and why."""
    ballot = Ballot(*grid(2), timeout=LONG)
    mine = (REFUSE, "a reason") if dist.get_rank() == who else (GO,)

    decision = ballot.vote(*mine)
    assert decision.word is REFUSE
    assert decision.reasons == (Reason(who, REFUSE, "a reason"),)
    assert ballot.vote(GO).word is GO


@pytest.mark.ranks
@ranks(4)
def test_votes_follow_each_other() -> None:
    """Many ballots of several votes on the same groups never read each other's words."""
    groups = grid(4)
    for number in range(15):
        ballot = Ballot(*groups, timeout=LONG)
        with ballot.watching():
            assert ballot.vote(WARM).word is WARM
            assert ballot.vote(GO, detail={"number": number}).stages[3].detail["number"] == (number, number, 3, 3)


@pytest.mark.ranks
@ranks(4)
def test_keys_do_not_pile_up() -> None:
    """After many votes the store holds as many keys of ours as after three."""
    groups = grid(2)

    def keys() -> int:
        return sum("pp_free_warmup" in key for key in world_store().list_keys())

    counts = []
    for _ in range(12):
        ballot = Ballot(*groups, timeout=LONG)
        with ballot.watching():
            ballot.vote(GO)
        dist.barrier()
        counts.append(keys())
        dist.barrier()
    assert counts[-1] == counts[3]


def world_store() -> dist.Store:
    """Return the world's store."""
    return dist.distributed_c10d._get_process_group_store(dist.group.WORLD)


@pytest.mark.ranks
@ranks(4)
def test_two_pipelines_of_one_world_decide_apart() -> None:
    """Pipelines that share no rank vote without knowing of each other."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([rank]) for rank in range(4)]
    mine = dist.get_rank() // 2
    if mine == 0:
        time.sleep(0.5)

    decision = Ballot(pairs[mine], (alone[dist.get_rank()],), timeout=LONG).vote(GO if mine == 0 else OFF)
    assert decision.word is (GO if mine == 0 else OFF)


@pytest.mark.ranks
@ranks(3)
def test_a_rank_of_the_world_that_never_calls_is_not_missed() -> None:
    """Two of three ranks form the pipeline; the third takes no part."""
    pair = dist.new_group([0, 2])
    alone = [dist.new_group([rank]) for rank in range(3)]
    if dist.get_rank() != 1:
        assert Ballot(pair, (alone[dist.get_rank()],), timeout=LONG).vote(GO).word is GO


@pytest.mark.ranks
@ranks(8)
def test_a_stage_of_two_groups_is_walked_in_order() -> None:
    """Tensor groups and then data groups reach a stage's ranks when no single group spans them."""
    rank = dist.get_rank()
    tensor = [dist.new_group([first, first + 1]) for first in range(0, 8, 2)][rank // 2]
    data = [dist.new_group([first, first + 2]) for first in (0, 1, 4, 5)][(rank // 4) * 2 + rank % 2]
    pipeline = [dist.new_group([first, first + 4]) for first in range(4)][rank % 4]
    ballot = Ballot(pipeline, (tensor, data), timeout=LONG)

    with ballot.watching():
        decision = ballot.vote(GO if rank != 7 else SKIP, "last" if rank == 7 else "")
        assert decision.word is SKIP
        assert decision.reasons == (Reason(7, SKIP, "last"),)
        assert [stage.ranks for stage in ballot.vote(GO).stages] == [4, 4]


@pytest.mark.ranks
@ranks(4)
def test_stages_ordered_differently_are_refused() -> None:
    """Where the stages' first ranks share no pipeline, all ranks refuse and say so, well before the timeout."""
    rank = dist.get_rank()
    stage = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    crossing = [dist.new_group([0, 3]), dist.new_group([1, 2])][rank in (1, 2)]
    if rank >= 2:
        time.sleep(2.0)  # by then the others are gone

    decision = Ballot(crossing, (stage,), timeout=LONG).vote(GO)
    assert decision.word is REFUSE
    assert "do not list their ranks alike" in decision.reasons[0].reason


@pytest.mark.ranks
@ranks(4)
def test_groups_of_a_known_name_start_afresh() -> None:
    """Group objects that get the names of destroyed ones, on the same store, never read their words."""
    groups = grid(2)
    for word in (GO, OFF, WARM):
        ballot = Ballot(*groups, timeout=LONG)
        assert [ballot.vote(word).word for _ in range(3)] == [word] * 3
        dist.barrier()
        Hall._places.clear()  # as when the objects are gone


@pytest.mark.ranks
@ranks(2)
def test_the_group_behind_a_rebuilding_wrapper_is_used() -> None:
    """A wrapper that keeps the real group as `.group` votes through that one."""

    class Rebuilding(dist.ProcessGroup):
        def __init__(self, group):
            super().__init__(group.rank(), group.size())
            self.group = group

    pipeline, stage = grid(2)
    assert Ballot(Rebuilding(pipeline), stage, timeout=LONG).vote(GO).word is GO


@pytest.mark.ranks
@ranks(8)
def test_a_vote_is_quick() -> None:
    """Votes of eight ranks take at most 50 ms, a quarter of them even on a machine that is busy otherwise."""
    groups = grid(4)
    seconds = []
    ballot = Ballot(*groups, timeout=LONG)
    with ballot.watching():
        for _ in range(21):
            dist.barrier()
            began = time.perf_counter()
            ballot.vote(GO)
            seconds.append(time.perf_counter() - began)
    assert sorted(seconds)[5] <= 0.05


# Failure


def watched(lines: list[str]) -> None:
    """Collect what the library logs into *lines*."""

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logging.getLogger("pp_free_warmup").addHandler(Keep())


@pytest.mark.ranks
@pytest.mark.parametrize("who", range(4))
@ranks(4)
def test_a_failure_is_heard_while_the_others_still_work(who) -> None:
    """A rank that fails says so at once; the others log it before they vote, and read it as decided."""
    lines: list[str] = []
    watched(lines)
    ballot = Ballot(*grid(2), timeout=4.0)
    with ballot.watching():
        assert ballot.vote(GO).word is GO
        if dist.get_rank() != who:
            time.sleep(1.5)
            assert any(f"rank {who} failed: out of memory" in line for line in lines)
        decision = ballot.vote(*((FAILED, "out of memory") if dist.get_rank() == who else (GO,)))
    assert decision.word is FAILED
    assert Reason(who, FAILED, "out of memory") in decision.reasons


@pytest.mark.ranks
@ranks(2)
def test_a_slow_rank_is_not_late() -> None:
    """A rank that shows signs of life and progress may work for many timeouts."""
    ballot = Ballot(*grid(2), timeout=0.5)
    with ballot.watching():
        ballot.vote(GO)
        if dist.get_rank() == 1:
            for step in range(16):
                ballot.tell("compiling", step)
                time.sleep(0.25)
        assert ballot.vote(GO).word is GO


@pytest.mark.ranks
@ranks(2)
def test_progress_is_told_on_the_first_rank_alone() -> None:
    """The pipeline's first rank gets lines about all stages, nobody else does."""
    lines: list[str] = []
    ballot = Ballot(*grid(2), timeout=2.0)
    with ballot.watching(lines.append, every=0.5):
        ballot.vote(GO)
        ballot.tell(f"forward of chunk 0 by {dist.get_rank()}")
        time.sleep(1.6)
        ballot.vote(GO)
    if dist.get_rank() == 0:
        assert any("stage 1: forward of chunk 0 by 1" in line for line in lines)
        assert all(line.startswith("pp_free_warmup: stage 0: ") for line in lines)
    else:
        assert lines == []


def silent_in_first_vote(who: int, timeout: float) -> str:
    """Vote on all ranks but *who*, which comes much too late."""
    ballot = Ballot(*grid(2), timeout=timeout)
    if dist.get_rank() == who:
        time.sleep(timeout + 5)
    began = time.monotonic()
    try:
        ballot.vote(GO)
    except RankSilent as silent:
        return json.dumps([silent.found, time.monotonic() - began, silent.do])
    return "went"


@pytest.mark.ranks
@pytest.mark.parametrize("who", range(4))
def test_a_silent_rank_is_named_on_all_and_obeys_when_it_comes(who):
    """All end with the same error in time, the late rank included: what is stored holds."""
    endings = run_forked(silent_in_first_vote, 4, who, 2.0)

    said = [json.loads(ending.value) for ending in endings]
    assert {ending.kind for ending in endings} == {"returned"}
    assert len({found for found, _, _ in said}) == 1
    assert f"rank {who} never came to this call" in said[0][0]
    assert "A rank that never came to this call may have no pipeline_warmup block around it" in said[0][2]
    assert all(seconds < 2.0 + 5.0 for _, seconds, _ in said)


def killed_in_pass(who: int, timeout: float) -> tuple[str, float]:
    """Kill *who* between two votes; return the others' error and the seconds that it took to come."""
    ballot = Ballot(*grid(2), timeout=timeout)
    with pytest.raises(RankSilent) as silent, ballot.watching():
        ballot.vote(GO)
        ballot.tell("forward of chunk 0")
        time.sleep(0.3)
        if dist.get_rank() == who:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        ballot.vote(GO)
    return silent.value.found, time.monotonic() - began


def named(endings: list[Ending], who: int, words: str) -> None:
    """Check that all ranks but *who* raised RankSilent with *words*, in time."""
    for rank, ending in enumerate(endings):
        if rank != who:
            assert ending.kind == "returned", ending.text
            found, seconds = ending.value
            assert words in found
            assert seconds < 2.0 + 5.0


@pytest.mark.ranks
@pytest.mark.parametrize("store", ["agent", "rank0", "file"])
@pytest.mark.parametrize("who", [1, 2])
def test_a_killed_rank_is_lost(who, store):
    """A killed rank is named, with its last phase, under each way of starting a world."""
    endings = run_forked(killed_in_pass, 4, who, 2.0, store=store)

    assert endings[who].kind == "killed"
    named(endings, who, f"rank {who} is lost: no sign of life for")
    assert "last seen in 'forward of chunk 0'; expected a sign of life at least every 2 s" in endings[3].value[0]
    assert "and progress at least every 12 s" in endings[3].value[0]


@pytest.mark.ranks
def test_a_killed_host_of_the_store_is_named():
    """Without its store no rank can vote: each ends at once and says whose process served it."""
    endings = run_forked(killed_in_pass, 4, 0, 2.0, store="rank0")

    assert endings[0].kind == "killed"
    named(endings, 0, "expected an answer from the store (global rank 0")


def stuck_in_pass(timeout: float) -> None:
    """Let rank 1 live for long without getting anywhere."""
    ballot = Ballot(*grid(2), timeout=timeout)
    with ballot.watching():
        ballot.vote(GO)
        ballot.tell("backward of chunk 0")
        if dist.get_rank() == 1:
            time.sleep(8 * timeout)
        ballot.vote(GO)


@pytest.mark.ranks
def test_a_stuck_rank_is_named_alive_without_progress():
    """A rank whose thread lives but whose work stands still ends the wait after six timeouts."""
    endings = run_forked(stuck_in_pass, 2, 0.5)

    assert [ending.value for ending in endings] == ["RankSilent", "RankSilent"]
    assert "rank 1 is alive but made no progress" in endings[0].text
    assert "backward of chunk 0" in endings[0].text


def votes_crosswise(timeout: float) -> None:
    """Let the two ranks of a pipeline vote in different groups first, as two models' first calls may."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    ballot = Ballot(second if dist.get_rank() else first, (), timeout=timeout)
    with ballot.watching():
        ballot.vote(GO)


@pytest.mark.ranks
def test_ranks_that_vote_crosswise_do_not_wait_for_ever():
    """Both live, and each waits where the other does not come: both are told so after six timeouts."""
    endings = run_forked(votes_crosswise, 2, 0.5)

    assert [ending.value for ending in endings] == ["RankSilent", "RankSilent"]
    assert "has waited in another vote than this one" in "".join(ending.text for ending in endings)


def leaves_while_others_work() -> str:
    """Let the host of the store fail and leave at once, while rank 1 works on."""
    ballot = Ballot(*grid(2), timeout=4.0)
    with ballot.watching():
        ballot.vote(GO)
        if dist.get_rank() == 0:
            assert ballot.vote(FAILED, "out of memory").word is FAILED
            os._exit(0)
        time.sleep(4)
        return ballot.vote(GO).reasons[0].reason


@pytest.mark.ranks
def test_a_failed_host_of_the_store_is_still_heard():
    """What a failing rank said counts, even when the store left with it."""
    endings = run_forked(leaves_while_others_work, 2, store="rank0")

    assert endings[1].value == "out of memory", endings[1].text


@pytest.mark.ranks
def test_no_thread_outlives_the_interpreter(tmp_path):
    """A process that exits inside a watched block ends normally: a live thread would abort it."""
    program = (
        "import torch.distributed as dist\n"
        "from pp_free_warmup._agreement import Ballot\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "ballot = Ballot(dist.new_group([0]), (), timeout=1.0)\n"
        "block = ballot.watching()\n"
        "block.__enter__()\n"
        "print('end')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=200, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr


TORCHRUN = """
import torch.distributed as dist
from pp_free_warmup._agreement import Ballot, Word
from pp_free_warmup._agreement.mailbox import store_host
dist.init_process_group("gloo")
alone = [dist.new_group([rank]) for rank in range(2)]
ballot = Ballot(dist.group.WORLD, (alone[dist.get_rank()],), timeout=30.0)
with ballot.watching():
    words = [ballot.vote(word).word.value for word in (Word.GO, Word.OFF, Word.WARM)]
print(words, store_host(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_votes_work_under_torchrun(tmp_path):
    """Two processes that torchrun started vote through its agent's store."""
    program = tmp_path / "program.py"
    program.write_text(TORCHRUN)
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*torchrun, str(program)], capture_output=True, text=True, timeout=250, check=False, env=environment
    )

    assert ended.stdout.count("['go', 'off', 'warm'] torchrun's agent of the first host") == 2, ended.stderr


def test_a_place_is_never_used_twice(tmp_path):
    """A second group object of the same name, on the same store, gets another place."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mailbox = Mailbox.of_world()
        first = Hall(dist.group.WORLD, mailbox, 0).place
        again = Hall(dist.group.WORLD, mailbox, 0).place
        Hall._places.pop(dist.group.WORLD)
        other = Hall(dist.group.WORLD, mailbox, 0).place
    finally:
        dist.destroy_process_group()
    assert first == again
    assert first.name != other.name


def test_a_world_without_a_store_is_refused(tmp_path, monkeypatch):
    """Where process groups meet without a store, the call is refused by name before anybody votes."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert _preflight.CHECKS_BEFORE_VOTE[-1](None) is None
        monkeypatch.setitem(dist.distributed_c10d._world.pg_map, dist.group.WORLD, ("mpi", None))
        refused = _preflight.CHECKS_BEFORE_VOTE[-1](None)
        with pytest.raises(UnsupportedSetup, match="no-store"):
            Mailbox.of_world()
        monkeypatch.undo()
    finally:
        dist.destroy_process_group()
    assert refused.name == "no-store"
