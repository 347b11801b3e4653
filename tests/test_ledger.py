"""What the ledger remembers of each model, and that one thread at a time prepares a call."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from pp_free_warmup import in_warmup
from pp_free_warmup._ledger import FORWARD_ONLY, TRAINING, Ledger, Page, kind_of, ledger
from pp_free_warmup.errors import WarmupFailed


class Group:
    """Stands for a process group, which is compared by identity and held weakly."""


def test_the_two_kinds_are_told_apart():
    """A call with ``forward_only`` is of the other kind than a training call."""
    assert kind_of(forward_only=True) == FORWARD_ONLY
    assert kind_of(forward_only=False) == TRAINING
    assert FORWARD_ONLY != TRAINING


def test_an_unknown_model_has_no_page():
    """A model that nobody wrote about is open in both kinds."""
    assert Ledger().page(torch.nn.Identity(), TRAINING) is None


def test_a_page_is_found_under_every_face_of_a_model():
    """Wrapped and unwrapped, the same model is warm."""
    book, wrapped, bare = Ledger(), torch.nn.Identity(), torch.nn.Identity()
    page = Page(warm=True)

    book.write((wrapped, bare), TRAINING, page)

    assert book.page(wrapped, TRAINING) is page
    assert book.page(bare, TRAINING) is page


def test_one_kind_leaves_the_other_open():
    """Warming forward-only calls does not use up the training call's once."""
    book, model = Ledger(), torch.nn.Identity()

    book.write((model,), FORWARD_ONLY, Page(warm=True))

    assert book.page(model, TRAINING) is None


def test_two_models_have_pages_of_their_own():
    """Two equal models in one process are two models."""
    book, one, two = Ledger(), torch.nn.Identity(), torch.nn.Identity()

    book.write((one,), TRAINING, Page(warm=True))

    assert book.page(two, TRAINING) is None


def test_a_model_dies_when_the_user_drops_it():
    """The ledger keeps no model alive, and forgets its page."""
    book, model = Ledger(), torch.nn.Identity()
    book.write((model,), TRAINING, Page(warm=True))
    gone = weakref.ref(model)

    del model
    gc.collect()

    assert gone() is None
    assert len(book._pages) == 0


def test_channels_are_open_in_the_group_that_was_primed():
    """In that one, and in no other; nor in none, where a call has several pipelines."""
    book, group = Ledger(), Group()
    book.prime(group)

    assert book.is_primed(group)
    assert not book.is_primed(Group())
    assert not book.is_primed(None)


def test_a_dead_group_is_forgotten():
    """Once the group is gone, a new one at the same address is not taken for it."""
    book, group = Ledger(), Group()
    book.prime(group)
    book.part(group, [TRAINING])

    del group
    gc.collect()

    assert len(book._primed) == len(book._apart) == 0


def test_kinds_that_are_apart_are_so_in_their_group():
    """They add up; other kinds, and rebuilt groups, are open."""
    book, group = Ledger(), Group()
    book.part(group, [TRAINING])
    only_training = book.is_apart(group, TRAINING), book.is_apart(group, FORWARD_ONLY)
    book.part(group, [FORWARD_ONLY])

    assert only_training == (True, False)
    assert book.is_apart(group, TRAINING)
    assert book.is_apart(group, FORWARD_ONLY)
    assert not book.is_apart(Group(), TRAINING)


def test_the_first_rebuilt_group_alone_is_news():
    """Groups that a pass opened are always news; rebuilt ones once."""
    book = Ledger()

    assert [book.prime(Group(), rebuilt=rebuilt) for rebuilt in (False, True, True, False)] == [
        True,
        True,
        False,
        True,
    ]


def test_a_pass_is_seen_in_its_own_thread_and_in_others():
    """``running`` is true for the process, ``running_here`` for the one thread."""
    book, seen = Ledger(), []

    with book.passing():
        asked = threading.Thread(target=lambda: seen.append((book.running, book.running_here)))
        asked.start()
        asked.join(10)
        mine = (book.running, book.running_here)

    assert mine == (True, True)
    assert seen == [(True, False)]
    assert (book.running, book.running_here) == (False, False)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_pass_that_raises_has_ended(error):
    """After an error in the pass nobody is inside a pass any more."""
    book = Ledger()

    with pytest.raises(error), book.turn(1), book.passing():
        raise error

    assert not book.running
    assert not book.taken
    with book.turn(0.1):
        assert book.taken


def test_in_warmup_is_true_inside_the_pass_only():
    """The public question is answered by the one ledger of the process."""
    assert in_warmup() is False
    with ledger.passing():
        assert in_warmup() is True
    assert in_warmup() is False


def test_a_second_thread_waits_for_its_turn():
    """While one thread prepares a call, the other stands still, and then goes on."""
    book, order, holds = Ledger(), [], threading.Event()

    def first() -> None:
        with book.turn(10):
            holds.set()
            time.sleep(0.2)
            order.append("first ends")

    def second() -> None:
        holds.wait(10)
        with book.turn(10):
            order.append("second begins")

    threads = [threading.Thread(target=body) for body in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    assert order == ["first ends", "second begins"]


def test_waiting_for_a_turn_is_bounded():
    """A thread whose patience ends gets an error that says what the other one is doing."""
    book = Ledger()
    with book.turn(1):
        raised = _in_a_thread(lambda: book.turn(0.05).__enter__())

    assert isinstance(raised, WarmupFailed)
    assert raised.args[0].splitlines()[0] == "Another thread of this process is still warming a pipeline."


def test_endless_patience_is_taken():
    """More seconds than a lock can count are as many as it can."""
    with Ledger().turn(float("inf")):
        pass


def _in_a_thread(act) -> BaseException | None:
    raised: list[BaseException] = []

    def body() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(10)
    return raised[0] if raised else None
