"""With the warmup and without: the same bits in every loss, gradient, parameter and activation."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch.utils.data import DataLoader, Dataset

from pp_free_warmup import pipeline_warmup
from pp_free_warmup.testing import run_on_ranks
from pp_free_warmup.testing.models import Layout, Training, batches, build, token_loss
from pp_free_warmup.testing.parity import (
    Script,
    accumulated_gradients,
    differences,
    forward_only_first,
    plain_step,
    record,
)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 20
COLD_STEPS = 4

Make = Callable[[Layout, int], Training]


@dataclass(frozen=True)
class Inputs:
    """What Megatron's ``PackedSeqParams`` is like: frozen, tensors, and objects that nobody may copy."""

    tokens: torch.Tensor
    position_ids: torch.Tensor
    group: Any


def structured_step(iterator: Iterator[Any] | None, chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run a microbatch that comes nested, aliased and expanded, and edit it in place as trainers do."""
    if iterator is None:
        return chunk(None, None, None), partial(token_loss, None)
    batch = next(iterator)
    inputs, target = batch["inputs"], batch["targets"][0]
    assert batch["alias"] is inputs.tokens
    assert inputs.position_ids.stride(0) == 0
    assert inputs.group is dist.group.WORLD
    target["labels"].add_(1).remainder_(chunk.config.vocab_size_of_labels)
    output = chunk(inputs.tokens, inputs.position_ids, None, labels=target["labels"])
    return output, partial(token_loss, target["loss_mask"])


def structured(layout: Layout, seed: int) -> Training:
    """Build a training whose batches are nested, with an alias and an expanded tensor."""
    training = build(layout, seed, step=structured_step)
    training.config.vocab_size_of_labels = layout.vocab
    training.iterators = [None if each is None else map(_structured, each) for each in training.iterators]
    return training


def _structured(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    positions = batch["position_ids"][0].expand_as(batch["tokens"])
    inputs = Inputs(batch["tokens"], positions, dist.group.WORLD)
    target = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    return {"inputs": inputs, "targets": [target], "alias": inputs.tokens}


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Six steps' worth of samples, so that an epoch ends and is shuffled anew in the middle of a run."""

    def __init__(self, layout: Layout) -> None:
        stream = batches(replace(layout, micro_batch=1), 1)
        count = 6 * layout.num_microbatches * layout.micro_batch
        self.samples = [{name: value[0] for name, value in next(stream).items()} for _ in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.samples[index]


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def shuffled(workers: int, layout: Layout, seed: int) -> Training:
    """Build a training that draws its order from torch's default generator, at its first batch."""
    training = build(layout, seed)
    loader = DataLoader(Samples(layout), batch_size=layout.micro_batch, shuffle=True, num_workers=workers)
    training.iterators = [None if each is None else _endless(loader) for each in training.iterators]
    return training


def resumed(layout: Layout, seed: int) -> Training:
    """Build a training that goes on from another one's checkpoint, with its random states and data."""
    first = build(layout, seed)
    for _ in range(3):
        first.step()
    saved = io.BytesIO()
    torch.save([[chunk.state_dict() for chunk in first.chunks], first.optimizer.state_dict()], saved)
    saved.seek(0)
    models, optimizer = torch.load(saved, weights_only=False)
    training = build(layout, seed + 1)
    for chunk, state in zip(training.chunks, models, strict=True):
        chunk.load_state_dict(state)
    training.optimizer.load_state_dict(optimizer)
    training.iterators = first.iterators
    return training


@dataclass(frozen=True)
class Run:
    """One configuration: how many ranks train what, how, and before which step the warmed run is warmed.

    ``needs`` is a field of Megatron's config without which a release cannot do it.
    """

    n: int
    layout: Layout
    script: Script = plain_step
    make: Make = build
    kinds: tuple[str, ...] = ("training",)
    at: int = 0
    needs: str = ""


SMALL = Layout(layers=2)
VIRTUAL = Layout(vp=2)
OVERLAP = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
COMBINED = Layout(vp=2, ep=2, moe=True, bf16=True, options={"overlap_moe_expert_parallel_comm": True})

# Run every time; `nox -s slow` adds those below.
RUNS = {
    "pp2": Run(2, Layout()),
    "pp4": Run(4, Layout(pp=4)),
    "pp2 vpp2": Run(2, VIRTUAL),
    "pp2 tp2": Run(4, replace(SMALL, tp=2)),
    "pp2 dp2, sharded and overlapped": Run(4, replace(SMALL, **OVERLAP)),
    "pp2 vpp2 dp2, sharded and overlapped": Run(4, Layout(vp=2, **OVERLAP)),
    "pp2 ep2, experts": Run(4, replace(SMALL, moe=True, ep=2)),
    "pp2 vpp2, experts": Run(2, replace(VIRTUAL, moe=True)),
    "pp2 vpp2 ep2, combined steps": Run(4, COMBINED),
    "pp4, embedding and loss in stages of their own": Run(
        4, Layout(pp=4, layers=2, options={"pipeline_model_parallel_layout": "E|t|t|L"})
    ),
    "pp4, multi-token prediction in a stage of its own": Run(
        4,
        Layout(pp=4, layers=2, mtp=1, options={"pipeline_model_parallel_layout": "E|tt|m|L"}),
        needs="mtp_standalone",
    ),
    "full recompute": Run(2, replace(SMALL, recompute="full")),
    "selective recompute": Run(2, replace(SMALL, recompute="selective")),
    "untied": Run(2, replace(SMALL, tied=False)),
    "bf16": Run(2, replace(SMALL, bf16=True)),
    "fp16": Run(2, replace(SMALL, fp16=True)),
    "multi-token prediction": Run(2, replace(SMALL, mtp=1)),
    "variable lengths": Run(2, replace(SMALL, variable_seq_lengths=True)),
    "deallocated outputs": Run(2, replace(SMALL, deallocate=True)),
    "frozen first stage": Run(2, replace(SMALL, tied=False, frozen_stages=(0,))),
    "forward-only first": Run(2, SMALL, forward_only_first, kinds=("forward-only", "training")),
    "gradients at entry": Run(2, SMALL, accumulated_gradients),
    "gradients at entry, in mid-run": Run(2, SMALL, accumulated_gradients, at=7),
    "resumed from a checkpoint": Run(2, SMALL, make=resumed),
    "shuffling loader": Run(2, SMALL, make=partial(shuffled, 0)),
    "shuffling loader, 2 workers": Run(2, SMALL, make=partial(shuffled, 2)),
    "structured batches": Run(2, SMALL, make=structured),
}

MORE_RUNS = {
    "pp2 vpp4": Run(2, Layout(vp=4, layers=8)),
    "pp4 vpp2": Run(4, Layout(pp=4, vp=2, layers=8)),
    "pp2, uneven": Run(2, Layout(layers=3, options={"num_layers_in_first_pipeline_stage": 1})),
    "pp4, one microbatch": Run(4, Layout(pp=4, num_microbatches=1)),
    "pp2 vpp2 ep2, combined steps, delayed weight gradients": Run(
        4,
        replace(COMBINED, options={**COMBINED.options, "delay_wgrad_compute": True}),
        needs="use_mup",  # as old as `backward_dw` of Megatron's own layers: 0.17
    ),
    "pp2 vpp2 ep2, combined steps, variable lengths": Run(4, replace(COMBINED, variable_seq_lengths=True)),
    "pp2 ep2, experts, all gather": Run(4, replace(SMALL, moe=True, ep=2, dispatcher="allgather")),
    "experts and multi-token prediction": Run(2, replace(SMALL, moe=True, mtp=1)),
    "pp2 vpp2, full recompute": Run(2, replace(VIRTUAL, recompute="full")),
    "pp2 vpp2, selective recompute": Run(2, replace(VIRTUAL, recompute="selective")),
    "pp2 vpp2, bf16": Run(2, replace(VIRTUAL, bf16=True)),
    "pp2 vpp2, multi-token prediction": Run(2, replace(VIRTUAL, mtp=1)),
    "pp2 vpp2, variable lengths": Run(2, replace(VIRTUAL, variable_seq_lengths=True)),
    "pp2 vpp2, frozen first stage": Run(2, replace(VIRTUAL, tied=False, frozen_stages=(0,))),
    "pp2 vpp2, forward-only first": Run(2, VIRTUAL, forward_only_first, kinds=("forward-only", "training")),
    "pp2 vpp2, gradients at entry": Run(2, VIRTUAL, accumulated_gradients),
    "pp2 vpp2 dp2, sharded and overlapped, in mid-run": Run(4, replace(VIRTUAL, **OVERLAP), at=7),
    "resumed from a checkpoint, fp16": Run(2, replace(SMALL, fp16=True), make=resumed),
}


def compare(name: str) -> None:
    """Train cold, cold again, and warmed; assert on this rank that all three agree."""
    run = (RUNS | MORE_RUNS)[name]
    blocks: list[Any] = []

    def around(training: Training) -> Any:
        blocks.append(pipeline_warmup(training.chunks, training.optimizer))
        return blocks[-1]

    recorded = partial(record, run.layout, script=run.script, make=run.make, at=run.at)
    cold = recorded(STEPS)
    again = recorded(COLD_STEPS)
    _assert_equal("two cold runs", cold, again)
    warmed = recorded(STEPS, around=around)
    _assert_equal("a cold and a warmed run", cold, warmed)

    assert [(report.outcome, report.kind) for report in blocks[0].reports] == [("warmed", kind) for kind in run.kinds]


def _assert_equal(which: str, run: list[Any], other: list[Any]) -> None:
    found = differences(run, other)
    assert not found, "\n".join([f"{which} differ:", *found])


@pytest.mark.parametrize("name", RUNS)
def test_a_warmed_run_equals_a_cold_one(name: str) -> None:
    """Twenty steps agree to the bit, the warmup having really run; first, two cold runs agree."""
    _compare_on_ranks(name, RUNS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_RUNS)
def test_more_warmed_runs_equal_cold_ones(name: str) -> None:
    """The same of features in combination."""
    _compare_on_ranks(name, MORE_RUNS[name])


def _compare_on_ranks(name: str, run: Run) -> None:
    if run.needs and run.needs not in TransformerConfig.__dataclass_fields__:
        pytest.skip(f"this release has no {run.needs}")
    run_on_ranks(compare, run.n, name, timeout=300)
