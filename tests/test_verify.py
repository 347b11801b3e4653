"""With ``verify=True`` a warmup compares the caller's own model before and after, and names what changed."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import another_file
import pytest
import torch
import torch.distributed as dist
from pipelines import SMALL

from pp_free_warmup import pipeline_warmup
from pp_free_warmup.errors import TraceFound, WarmupFailed
from pp_free_warmup.testing import models, ranks
from pp_free_warmup.testing.models import Layout

pytestmark = pytest.mark.ranks
LAST = 1
SEEN: list[int] = []


class Hiding(torch.nn.Module):
    """A module without parameters that leaves something in one place at each forward."""

    calls_of_all = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))


def _in_the_class(hiding: Hiding) -> None:
    type(hiding).calls_of_all += 1


def _in_the_file(_hiding: Hiding) -> None:
    SEEN.append(1)


def _in_another_file(_hiding: Hiding) -> None:
    another_file.count_there()


def _in_the_environment(_hiding: Hiding) -> None:
    os.environ["CALLS"] = os.environ.get("CALLS", "") + "1"


PLACES: dict[str, tuple[Callable[[Hiding], None], str]] = {
    "class": (_in_the_class, "test_verify:Hiding.calls_of_all: 0 -> 1"),
    "file": (_in_the_file, "test_verify:SEEN[0]: absent -> 1"),
    "another file": (_in_another_file, "further_file:CALLS['all']: "),
    "environment": (_in_the_environment, "environ[b'CALLS']: "),
}
GUARDED: dict[str, Callable[[Hiding], Any]] = {
    "field": lambda hiding: setattr(hiding, "calls", 1),
    "list in a field": lambda hiding: vars(hiding).setdefault("log", []).append(1),
    "hook": lambda hiding: hiding.register_forward_hook(lambda *_: None),
    "buffer": lambda hiding: hiding.seen.add_(1),
    "new buffer": lambda hiding: hiding.register_buffer("later", torch.zeros(1)),
    "random numbers": lambda _hiding: torch.rand(1),
}


def _training(hide: Callable[[Hiding], Any], layout: Layout = SMALL) -> Any:
    """Build a training on whose last stage a module hides something at each forward."""
    training = models.build(layout)
    if dist.get_rank() == LAST:
        hiding, model = Hiding(), training.chunks[0].module

        def before_forward(*_: Any) -> None:
            hide(hiding)

        model.hiding = hiding
        model.register_forward_pre_hook(before_forward)
    return training


def _warmed(training: Any, **options: Any) -> Any:
    with pipeline_warmup(training.chunks, training.optimizer, verify=True, **options) as warmup:
        training.step()
    return warmup


def _assert_stops(training: Any, path: str) -> None:
    """The rank with the trace names its path, the other ranks name that rank."""
    with pytest.raises((TraceFound, WarmupFailed)) as raised:
        _warmed(training)
    expected = TraceFound if dist.get_rank() == LAST else WarmupFailed
    assert type(raised.value) is expected
    assert path in str(raised.value)
    if expected is WarmupFailed:
        assert f"rank {LAST}: TraceFound" in str(raised.value)
        assert "not every rank could undo it" in str(raised.value)


@pytest.mark.parametrize("place", PLACES)
@ranks(2)
def test_what_a_module_hides_is_named_by_its_path(place: str) -> None:
    """State in a class, a file, a file two calls away or the environment stops the run."""
    SEEN.clear()
    Hiding.calls_of_all = 0
    hide, path = PLACES[place]
    _assert_stops(_training(hide), path)


@pytest.mark.parametrize("place", GUARDED)
@ranks(2)
def test_what_a_guard_puts_back_is_no_trace(place: str) -> None:
    """What comes back is not complained of, and the run goes on; the report has what looking cost."""
    warmup = _warmed(_training(GUARDED[place]))

    assert warmup.report.outcome == "warmed"
    assert warmup.report.seconds["verify"] > 0


@ranks(2)
def test_a_guard_of_ones_own_ends_the_complaint() -> None:
    """What a module leaves passes once it is kept by an extra guard."""
    training = _training(_in_the_file)

    @contextmanager
    def counts(_call: Any) -> Iterator[None]:
        before = list(SEEN)
        try:
            yield
        finally:
            SEEN[:] = before

    warmup = _warmed(training, extra_guards=[counts])

    assert warmup.report.outcome == "warmed"


@ranks(4)
def test_combined_steps_leave_no_trace() -> None:
    """Neither their streams nor what each layer keeps for its weight gradients are complained of."""
    options = {"overlap_moe_expert_parallel_comm": True}
    training = models.build(Layout(vp=2, ep=2, moe=True, bf16=True, options=options))
    assert _warmed(training).report.outcome == "warmed"


@ranks(2)
def test_it_can_be_switched_on_from_outside() -> None:
    """``PP_FREE_WARMUP_VERIFY=1`` looks as well; by default nobody does."""
    with pytest.MonkeyPatch.context() as patch:
        first = _training(_in_the_file)
        with pipeline_warmup(first.chunks) as warmup:
            first.step()
        assert "verify" not in warmup.report.seconds
        second = _training(_in_the_file)
        patch.setenv("PP_FREE_WARMUP_VERIFY", "1")
        with pytest.raises((TraceFound, WarmupFailed)), pipeline_warmup(second.chunks):
            second.step()


class Counting:
    """An iterator that counts, keeps and draws for each batch, in itself and in its file."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches
        self.position = 0
        self.lengths: list[int] = []
        self.random = random.Random(1)

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> Any:
        batch = next(self.batches)
        self.position += 1
        self.lengths.append(batch["tokens"].shape[1] + self.random.randrange(2))
        SEEN.append(self.position)
        return batch


@ranks(2)
def test_what_fetching_a_batch_changes_is_no_trace() -> None:
    """The real step would have fetched it too: its iterator's fields, generator and file may have moved on."""
    training = models.build(SMALL)
    training.iterators = [None if each is None else Counting(each) for each in training.iterators]

    assert _warmed(training).report.outcome == "warmed"
    assert all(each.position == len(each.lengths) == SMALL.num_microbatches for each in training.iterators)


@ranks(2)
def test_what_the_forward_step_changes_beside_fetching_is_a_trace() -> None:
    """The excuse holds for what the fetch itself changed, and for nothing else of the same file."""
    training = models.build(SMALL)
    training.iterators = [None if each is None else Counting(each) for each in training.iterators]

    def step(iterator: Any, chunk: Any) -> Any:
        Hiding.calls_of_all += dist.get_rank() == LAST
        return models.forward_step(iterator, chunk)

    training.forward_step = step
    _assert_stops(training, "test_verify:Hiding.calls_of_all: ")


@ranks(4)
def test_a_warning_that_is_given_once_is_no_trace(monkeypatch):
    """Megatron warns of a variable with tensor parallelism, once per process; a verified warmup may be that once."""
    from megatron.core.tensor_parallel import layers

    linear = layers.linear_with_grad_accumulation_and_async_allreduce
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(linear, "warned", False)
    training = models.build(replace(SMALL, tp=2))
    with warnings.catch_warnings(), pipeline_warmup(training.chunks, training.optimizer, verify=True) as warmup:
        warnings.simplefilter("ignore")
        training.step()

    assert warmup.report.outcome == "warmed"
    assert linear.warned
