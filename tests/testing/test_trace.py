"""Whatever a block leaves behind is named by its path; what it does not touch is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from pp_free_warmup.testing import assert_leaves_no_trace, cuda_on_cpu, ranks
from pp_free_warmup.testing.models import Layout, build


class Counted(torch.nn.Module):
    """A module with everything a trace can be left in."""

    shared: dict[str, int] = {}  # noqa: RUF012 - class state is what is being tested

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.weight.main_grad = torch.zeros(2)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.calls = 0
        self.log: list[Any] = []
        self.holders = [self]


def _replace_buffer(model: Counted) -> None:
    model.seen = model.seen.clone()


def _replace_main_grad(model: Counted) -> None:
    model.weight.main_grad = model.weight.main_grad.clone()


def _hook(model: Counted) -> None:
    model.register_forward_hook(lambda *_: None)


TRACES: dict[str, tuple[Callable[[Counted], Any], str]] = {
    "parameter": (lambda model: model.weight.data.add_(1), "chunk0.weight"),
    "negative zero": (lambda model: model.seen.neg_(), "chunk0.seen"),
    "gradient": (lambda model: model.weight.sum().backward(), "chunk0.weight.grad"),
    "main_grad": (lambda model: model.weight.main_grad.add_(1), "chunk0.weight.main_grad"),
    "another main_grad": (_replace_main_grad, "chunk0.weight.main_grad"),
    "parameter's flag": (
        lambda model: setattr(model.weight, "grad_added_to_main_grad", True),
        "chunk0.weight.grad_added",
    ),
    "buffer": (lambda model: model.seen.add_(1), "chunk0.seen"),
    "another buffer": (_replace_buffer, "chunk0.seen"),
    "plain field": (lambda model: setattr(model, "calls", 1), "chunk0.calls"),
    "new field": (lambda model: setattr(model, "extra", None), "chunk0.extra: absent -> None"),
    "list": (lambda model: model.log.append(1), "chunk0.log[0]"),
    "hook": (_hook, "chunk0._forward_hooks"),
    "mode": (lambda model: model.eval(), "chunk0.training: True -> False"),
    "python random": (lambda _: random.random(), "random.python"),
    "numpy random": (lambda _: np.random.rand(), "random.numpy"),  # noqa: NPY002 - the legacy state is the global one
    "torch random": (lambda _: torch.rand(1), "random.torch"),
}


@pytest.mark.parametrize("kind", TRACES)
def test_trace_is_named(kind: str) -> None:
    """Each kind of trace is found, and its path is in the text."""
    leave, path = TRACES[kind]
    model = Counted()
    with _random_states_kept(), pytest.raises(AssertionError) as failure, assert_leaves_no_trace(model):
        leave(model)

    assert path in str(failure.value)


@contextmanager
def _random_states_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


def test_nothing_done_is_no_trace() -> None:
    """Reading, and changing things and putting them back, leaves no trace."""
    model = Counted()
    state = torch.get_rng_state()
    with assert_leaves_no_trace([model]):
        model.calls = 5
        torch.rand(1)
        model.calls = 0
        torch.set_rng_state(state)


def test_nan_is_no_trace() -> None:
    """A NaN that stays as it is counts as unchanged."""
    model = Counted()
    model.seen.fill_(float("nan"))
    with assert_leaves_no_trace(model):
        pass


def test_an_error_is_passed_on_unjudged() -> None:
    """When the block raises, its error is what is seen."""
    model = Counted()
    with pytest.raises(KeyError, match="mine"), assert_leaves_no_trace(model):
        model.calls += 1
        raise KeyError("mine")


def test_ignored_paths_may_change() -> None:
    """A pattern takes a path out of the comparison, and only that path."""
    model = Counted()
    with assert_leaves_no_trace(model, ignoring=["*.calls"]):
        model.calls += 1
    with pytest.raises(AssertionError, match="1 places"), assert_leaves_no_trace(model, ignoring=["*.calls"]):
        model.calls += 1
        model.log.append(None)


def test_optimizer_state_is_compared() -> None:
    """A step of a plain torch optimizer is found in its state."""
    model = Counted()
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.ones(2)
    with pytest.raises(AssertionError, match=r"optimizer\.state"), assert_leaves_no_trace(None, optimizer):
        optimizer.step()


def test_the_cuda_generator_is_compared() -> None:
    """Dropout on the device is found in "cuda"'s random state."""
    with cuda_on_cpu(), pytest.raises(AssertionError, match=r"random\.cuda0"), assert_leaves_no_trace():
        torch.nn.functional.dropout(torch.ones(4))


@ranks(2)
def test_megatrons_state_is_found_wherever_it_lives() -> None:
    """A real schedule call shows in gradients, buckets, loss trackers, the tracker's states and the stage's input."""
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import get_forward_backward_func

    training = build(Layout(mtp=1))
    with assert_leaves_no_trace(training.chunks, training.optimizer):
        pass
    with pytest.raises(AssertionError) as failure, assert_leaves_no_trace(training.chunks, training.optimizer):
        get_forward_backward_func()(**training.schedule_arguments())
    found = str(failure.value)

    everywhere = [
        "main_grad",
        "buffers[0].grad_data",
        "_CUDA_RNG_STATE_TRACKER.states_['model-parallel-rng']",
        "random.cuda0",
    ]
    last = ["MTPLossLoggingHelper.tracker", "decoder.input_tensor"]
    assert [path for path in everywhere + last * dist.get_rank() if path not in found] == []


@ranks(4)
def test_expert_state_is_found() -> None:
    """Experts' token counts, which no loss shows, and their logged loss are found; without a step nothing is."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    training = build(Layout(moe=True, ep=2, distributed_optimizer=True))
    training.config.finalize_model_grads_func = None  # it takes the counts into the bias and zeroes them
    with pytest.raises(AssertionError) as failure, assert_leaves_no_trace(training.chunks):
        get_forward_backward_func()(**training.schedule_arguments())
    found = str(failure.value)

    assert "mlp.router.local_tokens_per_expert" in found
    assert "load_balancing_loss" in found


@ranks(2)
def test_a_module_loaded_in_the_block_is_no_trace() -> None:
    """An import on the way brings its own globals; they are not the block's doing."""
    import sys
    import types

    with assert_leaves_no_trace():
        module = types.ModuleType("megatron.made_in_the_block")
        module.counter = 3  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
    del sys.modules["megatron.made_in_the_block"]
