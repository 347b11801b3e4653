"""What runs on the demo's ranks: the stand-in for compiling, and the timeline."""

from __future__ import annotations

import pytest
import torch

from pp_free_warmup._cli import _simulated
from pp_free_warmup._cli._simulated import first_uses_take
from pp_free_warmup._cli._timeline import Timeline


@pytest.fixture
def slept(monkeypatch):
    """Do not sleep, but note for how long it would have been."""
    naps = []
    monkeypatch.setattr(_simulated.time, "sleep", naps.append)
    return naps


def test_the_first_forward_and_the_first_backward_sleep(slept):
    """The delay of the backward comes in the backward, and each comes once."""
    chunk = torch.nn.Linear(2, 2)
    with first_uses_take(1.5, [chunk]):
        outputs = [chunk(torch.ones(1, 2)).sum() for _ in range(3)]
        assert slept == [1.5]
        for output in outputs:
            output.backward()
        chunk(torch.ones(1, 2)).sum().backward()

    assert slept == [1.5, 1.5]


def test_a_forward_without_gradients_leaves_the_backwards_delay_for_later(slept):
    """A forward-only call first does not use up the first backward."""
    chunk = torch.nn.Linear(2, 2)
    with first_uses_take(1.0, [chunk]):
        with torch.no_grad():
            chunk(torch.ones(1, 2))
        chunk(torch.ones(1, 2)).sum().backward()

    assert slept == [1.0, 1.0]


def test_sleeping_changes_no_value(slept):
    """Outputs and gradients are those of a chunk that never slept, and afterwards no hook is left."""
    chunk = torch.nn.Linear(2, 2)
    plain = chunk(torch.ones(1, 2))
    plain.sum().backward()
    gradient, chunk.weight.grad = chunk.weight.grad, None
    with first_uses_take(1.0, [chunk]):
        output = chunk(torch.ones(1, 2))
        output.sum().backward()

    assert torch.equal(output, plain)
    assert torch.equal(chunk.weight.grad, gradient)
    assert not chunk._forward_hooks


def test_every_chunk_has_its_own_first_use(slept):
    """With virtual stages each chunk of a rank sleeps for itself."""
    chunks = [torch.nn.Linear(2, 2) for _ in range(2)]
    with first_uses_take(1.0, chunks):
        for chunk in (*chunks, *chunks):
            chunk(torch.ones(1, 2)).sum().backward()

    assert slept == [1.0] * 4


def test_a_timeline_knows_the_chunk_of_every_step():
    """A backward belongs to the chunk that made its output, in whatever order they come; firsts are marked."""
    chunks, told = [object(), object()], []
    timeline = Timeline(chunks, told.append)
    outputs = [torch.ones(1), [torch.ones(1)]]
    forward = timeline._timed_forward(lambda _function, _iterator, model: (outputs[chunks.index(model)], 0))
    backward = timeline._timed_backward(lambda input_tensor, output_tensor: None)
    for chunk in (*chunks, chunks[0]):
        forward(None, None, chunk)
    for output in (outputs[1], outputs[0]):
        backward(input_tensor=None, output_tensor=output)

    assert [(span.use, span.chunk, span.first) for span in timeline.spans] == [
        ("forward", 0, True),
        ("forward", 1, True),
        ("forward", 0, False),
        ("backward", 1, True),
        ("backward", 0, True),
    ]
    assert told[:2] == ["first forward of chunk 0", "waits"]


def test_a_timeline_watches_megatrons_own_functions():
    """Inside the block the schedules call timed functions with the same signature; afterwards the very same objects."""
    import inspect

    from megatron.core.pipeline_parallel import schedules

    before = schedules.forward_step, schedules.backward_step
    with Timeline([], print).watching():
        assert schedules.forward_step is not before[0]
        assert inspect.signature(schedules.backward_step) == inspect.signature(before[1])

    assert (schedules.forward_step, schedules.backward_step) == before
