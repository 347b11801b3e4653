"""`warmup_now`: warm at a moment of one's own; what follows is as in a run without, and is not warmed again."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from pipelines import SMALL, VIRTUAL, call, pipeline

from pp_free_warmup import errors, pipeline_warmup, warmup_now
from pp_free_warmup.testing import models, ranks, run_on_ranks
from pp_free_warmup.testing.models import Layout, Training
from pp_free_warmup.testing.parity import differences, forward_only_first, record

DROPPING = replace(SMALL, dropout=0.1)


def now(training: Training, **keywords: Any) -> Any:
    """Warm a training that has not begun, with a batch that is none of its own."""
    layout = training.layout
    example = next(models.batches(layout, seed=99))
    given = {"batch": example, **keywords}
    return warmup_now(
        training.chunks,
        training.optimizer,
        forward_step_func=training.forward_step,
        num_microbatches=layout.num_microbatches,
        seq_length=layout.seq,
        micro_batch_size=layout.micro_batch,
        decoder_seq_length=layout.seq,
        **given,
    )


def loaded(layout: Layout, seed: int, *, warmed: bool) -> Training:
    """Build a training and load a checkpoint into it: weights, the optimizer's and the model's."""
    training = models.build(layout, seed)
    if warmed:
        for forward_only in (True, False):
            report = now(training, forward_only=forward_only)
            assert report.outcome == "warmed"
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for chunk in training.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    training.optimizer.reload_model_params()
    return training


def _cold(layout: Layout, seed: int) -> Training:
    return loaded(layout, seed, warmed=False)


def _warm(layout: Layout, seed: int) -> Training:
    return loaded(layout, seed, warmed=True)


def compared(layout: Layout) -> tuple[list[str], list[str]]:
    """Train from a checkpoint, without and with a warmup before it is loaded; return differences and later reports."""
    blocks: list[Any] = []

    def around(training: Training) -> Any:
        blocks.append(pipeline_warmup(training.chunks))
        return blocks[0]

    cold = record(layout, 4, make=_cold, script=forward_only_first)
    warm = record(layout, 4, make=_warm, around=around, script=forward_only_first)
    return differences(cold, warm), [blocks[0].report.reason]


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [DROPPING, replace(VIRTUAL, dropout=0.1), replace(DROPPING, pp=4, layers=4)])
def test_a_checkpoint_that_is_loaded_afterwards_trains_as_ever(layout):
    """Log-probs and steps are equal to the bit, and a block around them finds nothing left to do."""
    assert run_on_ranks(compared, layout.pp, layout) == [([], ["nothing was left to do"])] * layout.pp


@ranks(2)
def test_the_later_call_is_not_warmed_again():
    """A block runs no other pass, and the batch that was given is as it was."""
    training = pipeline()
    example = next(models.batches(SMALL, seed=99))
    before = copy.deepcopy(example)
    report = now(training, batch=example)
    with pipeline_warmup() as warmup:
        call(training)

    assert (report.outcome, report.kind, warmup.reports) == ("warmed", "training", [])
    assert training.forward_step.counts == (1, SMALL.num_microbatches)
    assert all(torch.equal(example[name], before[name]) for name in before)


@ranks(2)
def test_kinds_are_warmed_apart():
    """Log-probs that were warmed leave training to be warmed by its own first call."""
    training = pipeline()
    report = now(training, forward_only=True)
    with pipeline_warmup() as warmup:
        call(training)

    assert (report.kind, [each.kind for each in warmup.reports]) == ("forward-only", ["training"])


@ranks(2)
def test_an_iterator_gives_one_microbatch():
    """Whoever hands in an iterator finds one item taken from it."""
    training = pipeline()
    own = models.batches(SMALL, seed=99)
    twin = models.batches(SMALL, seed=99)
    report = now(training, batch=None, data_iterator=own)

    assert report.outcome == "warmed"
    next(twin)
    assert torch.equal(next(own)["tokens"], next(twin)["tokens"])


@ranks(2)
def test_it_warms_inside_an_open_block_too():
    """The block takes the later call, and has nothing to do."""
    training = pipeline()
    with pipeline_warmup() as warmup:
        report = now(training)
        call(training)

    assert report.outcome == "warmed"
    assert training.forward_step.passes == 1
    assert [each.outcome for each in warmup.reports] == ["warmed"]


@ranks(1)
def test_one_stage_has_nothing_to_warm():
    """The report says why nothing was done."""
    training = pipeline(replace(SMALL, pp=1))

    assert now(training).outcome == "skipped"


def test_what_cannot_be_is_refused_before_anything_is_touched():
    """Two sources of data, no groups, a missing size, a model that is none, a value that an option does not take."""
    model = torch.nn.Linear(1, 1)
    sizes = {"num_microbatches": 1, "seq_length": 1, "micro_batch_size": 1, "forward_step_func": print}
    with pytest.raises(errors.UnsupportedSetup, match="two sources of data"):
        warmup_now(model, batch=1, data_iterator=iter(()), **sizes)
    with pytest.raises(errors.NotInitialized):
        warmup_now(model, **sizes)
    with pytest.raises(errors.UnsupportedSetup, match="no model"):
        warmup_now(3, **sizes)
    with pytest.raises(errors.UnsupportedSetup, match="channels='some'"):
        warmup_now(model, channels="some", **sizes)
    with pytest.raises(errors.WrongCall, match="no seq_length"):
        warmup_now(model, forward_step_func=print, num_microbatches=1, micro_batch_size=1)


@ranks(2)
def test_a_keyword_that_means_nothing_is_refused():
    """A misspelt option is not taken for one of the schedule's."""
    training = pipeline()
    with pytest.raises(errors.UnsupportedSetup, match="Found: chanels; expected options of pipeline_warmup"):
        now(training, chanels="all")

    assert training.forward_step.counts == (0, 0)
