"""With ``verify=True`` a warmup compares the caller's own model before and after, and names what changed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
        self.calls = 0
        self.log: list[int] = []
        self.nested = {"deep": [0]}


def _in_a_field(hiding: Hiding) -> None:
    hiding.calls += 1


def _in_a_new_field(hiding: Hiding) -> None:
    hiding.first = True


def _in_a_list(hiding: Hiding) -> None:
    hiding.log.append(1)


def _deep_inside(hiding: Hiding) -> None:
    hiding.nested["deep"][0] += 1


def _in_the_class(hiding: Hiding) -> None:
    type(hiding).calls_of_all += 1


def _in_the_file(_hiding: Hiding) -> None:
    SEEN.append(1)


def _in_a_hook(hiding: Hiding) -> None:
    hiding.register_forward_hook(lambda *_: None)


PLACES: dict[str, tuple[Callable[[Hiding], None], str]] = {
    "field": (_in_a_field, ".hiding.calls: 0 -> 1"),
    "new field": (_in_a_new_field, ".hiding.first: absent -> True"),
    "list": (_in_a_list, ".hiding.log[0]: absent -> 1"),
    "dict of lists": (_deep_inside, ".hiding.nested['deep'][0]: 0 -> 1"),
    "class": (_in_the_class, "test_verify:Hiding.calls_of_all: 0 -> 1"),
    "file": (_in_the_file, "test_verify:SEEN[0]: absent -> 1"),
    "hook": (_in_a_hook, ".hiding._forward_hooks"),
}
GUARDED: dict[str, Callable[[Hiding], Any]] = {
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
    """State in a field, a container, a class, a file or a hook stops the run."""
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
    """The same module passes once its state is kept by an extra guard."""
    training = _training(_in_a_field)
    hidden = [module for module in training.chunks[0].modules() if isinstance(module, Hiding)]

    @contextmanager
    def counts(_call: Any) -> Iterator[None]:
        before = [module.calls for module in hidden]
        try:
            yield
        finally:
            for module, count in zip(hidden, before, strict=True):
                module.calls = count

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
        first = _training(_in_a_field)
        with pipeline_warmup(first.chunks) as warmup:
            first.step()
        assert "verify" not in warmup.report.seconds
        second = _training(_in_a_field)
        patch.setenv("PP_FREE_WARMUP_VERIFY", "1")
        with pytest.raises((TraceFound, WarmupFailed)), pipeline_warmup(second.chunks):
            second.step()


class Stepping:
    """A trainer's object whose method or call is the ``forward_step_func``."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, iterator: Any, chunk: Any) -> Any:
        """Count on the last stage, and run the microbatch."""
        self.steps += dist.get_rank() == LAST
        return models.forward_step(iterator, chunk)

    __call__ = step


def _closing_over() -> Any:
    count = [0]

    def step(iterator: Any, chunk: Any) -> Any:
        count[0] += dist.get_rank() == LAST
        return models.forward_step(iterator, chunk)

    return step


def _with_counter(counter: list[int], iterator: Any, chunk: Any) -> Any:
    counter[0] += dist.get_rank() == LAST
    return models.forward_step(iterator, chunk)


STEPS: dict[str, tuple[Callable[[], Any], str]] = {
    "closure": (_closing_over, "forward_step_func closure count[0]: 0 -> 1"),
    "method": (lambda: Stepping().step, "forward_step_func self.steps: 0 -> 1"),
    "object": (Stepping, "forward_step_func.steps: 0 -> 1"),
    "partial": (lambda: functools.partial(_with_counter, [0]), "forward_step_func argument 0[0]: 0 -> 1"),
}


@pytest.mark.parametrize("kind", STEPS)
@ranks(2)
def test_what_a_forward_step_holds_is_named(kind: str) -> None:
    """A closure, a method's object, a callable object and a partial's arguments are looked at too."""
    make, path = STEPS[kind]
    training = models.build(SMALL)
    training.forward_step = make()
    _assert_stops(training, path)
