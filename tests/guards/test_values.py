"""What is copied, what is watched, and how much memory a warmup takes."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from case import call_of
from pipelines import call, pipeline

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import _values, guards, pipeline_warmup
from pp_free_warmup.errors import RestoreFailed, TraceFound
from pp_free_warmup.guards import gradients, guarded, keep_parameters
from pp_free_warmup.testing import ranks


class Experts(torch.nn.Module):
    """Has its weights once more as one buffer, as experts for fast inference do, and counts in another."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))
        self.register_buffer("together", self.weight.detach())
        self.register_buffer("counted", torch.zeros(2))


@pytest.fixture
def small_copies(monkeypatch):
    """Let a buffer of more than 16 bytes be too large to copy."""
    monkeypatch.setattr(_values, "LARGEST_COPY", 16)


@pytest.mark.usefixtures("small_copies")
def test_a_large_buffer_costs_no_memory():
    """Only what a forward is known to write is copied: buffers of some size, the smallest first."""
    model = Experts()
    copied, watched = _values.copied_and_watched(call_of(model))

    assert [id(one) for one in copied] == [id(model.counted)]
    assert {id(one) for one in watched} == {id(model.weight), id(model.together)}


def _peak() -> int:
    """Return the most memory that this process has held since the last call, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [peak] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    Path("/proc/self/clear_refs").write_text("5")
    return peak


@pytest.mark.ranks
@ranks(2)
def test_a_warmup_takes_no_memory_for_weights_that_lie_in_a_buffer_too():
    """Weights of 256 MiB that are one buffer as well are there once, during the pass as before it."""
    training = pipeline()
    layer = megatron.unwrapped(training.chunks[0]).decoder.layers[0].mlp
    layer.weights = torch.nn.Parameter(torch.ones(2**26), requires_grad=False)
    layer.register_buffer("together", layer.weights.detach())
    _peak()
    before = _peak()
    with pipeline_warmup() as warmup:
        call(training)

    assert _peak() - before < 2**26
    assert warmup.report.outcome == "warmed"
    assert set(warmup.report.memory) == set(warmup.report.to_dict()["memory"]) == {"buffers", "gradients"}
    assert 0 < sum(warmup.report.memory.values()) < 2**20


def test_all_copies_together_are_bounded(monkeypatch):
    """Many buffers of some size are no way around the bound."""
    monkeypatch.setattr(_values, "ALL_COPIES", 100)
    model = torch.nn.ParameterList()
    for number in range(9):
        model.register_buffer(f"table{number}", torch.zeros(8))
    copied, watched = _values.copied_and_watched(call_of(model))

    assert (len(copied), len(watched)) == (3, 6)


@pytest.mark.usefixtures("small_copies")
def test_a_large_buffer_that_was_written_is_named():
    """Loudly, with the line that keeps it; and with that line it comes back."""
    model = Experts()
    call = call_of(model)
    with pytest.raises(TraceFound) as raised, guards.values(call):
        model.together.mul_(2)
    assert "chunk0.together" in raised.value.found
    assert 'keep_parameters("weight", "together")' in raised.value.do  # the memory is shared, and so is the version

    model = Experts()
    call = call_of(model)
    with guards.values(call), keep_parameters("weight", "together")(call):
        model.together.mul_(2)
    assert model.together.tolist() == [1] * 64


def test_a_parameter_that_is_only_read_is_no_trace():
    """Nor is one whose gradient is written, or that is looked at through views."""
    model = torch.nn.Linear(2, 2)
    with guards.values(call_of(model)):
        model(model.weight.view(2, 2)).sum().backward()


def test_a_write_through_data_is_not_seen():
    """It leaves no version; `verify` compares the values."""
    model = torch.nn.Linear(2, 2)
    with guards.values(call_of(model)):
        model.weight.data.mul_(2)


def test_a_trace_is_told_as_a_trace():
    """Also where all guards are left together; beside another failure it is one of several."""
    model = Experts()

    def broken(_call):
        yield
        raise OSError

    with pytest.raises(TraceFound), guarded(call_of(model)), torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RestoreFailed, match="'values'"):
        with guarded(call_of(model), [contextmanager(broken)]), torch.no_grad():
            model.weight.mul_(2)


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [("weight", True), ("chunk0.0.weight", True), ("0.weigh?", True), ("bias", False), ("eight", False)],
)
def test_a_pattern_names_the_whole_or_the_end(pattern, kept):
    """As `fnmatch` does, and never the middle of a word."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    call = call_of(model)
    with keep_parameters(pattern)(call):
        pass

    assert (id(model[0].weight) in call.kept) == kept


# --- gradients ---


def _accumulating(value):
    model = torch.nn.Linear(4, 4, bias=False)
    model.weight.main_grad = torch.full((4, 4), value)
    return model, call_of(model)


@pytest.mark.parametrize(("value", "taken"), [(0.0, 0), (-0.0, 64), (3.0, 64)])
def test_a_large_gradient_of_zeros_takes_no_memory(value, taken, monkeypatch):
    """It is written, and zeroed: to the bit what it was. One that holds anything is not touched."""
    monkeypatch.setattr(sys.modules[gradients.__module__], "LARGE", 0)
    model, call = _accumulating(value)
    main, before = model.weight.main_grad, model.weight.main_grad.clone()
    with guards.gradients(call):
        model.weight.main_grad.add_(1)

    assert model.weight.main_grad is main
    assert torch.equal(main.view(torch.int32), before.view(torch.int32))
    assert call.taken["gradients"] == taken
