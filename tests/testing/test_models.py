"""The tiny models train, on every layout that they offer."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from pp_free_warmup.testing import models, ranks, run_on_ranks
from pp_free_warmup.testing.models import Layout, batches, build

OVERLAPPED = Layout(distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
LAYOUTS = {
    "pp2": (2, Layout()),
    "pp4": (4, Layout(pp=4)),
    "virtual stages": (2, Layout(vp=2)),
    "tensor parallel": (4, Layout(tp=2)),
    "data parallel": (4, OVERLAPPED),
    "experts, all to all": (4, Layout(moe=True, ep=2)),
    "experts, all gather": (4, Layout(moe=True, ep=2, dispatcher="allgather")),
    "full recompute": (2, Layout(recompute="full")),
    "selective recompute": (2, Layout(recompute="selective")),
    "untied": (2, Layout(tied=False)),
    "bf16": (2, Layout(bf16=True)),
    "multi-token prediction": (2, Layout(mtp=1)),
    "variable lengths": (2, Layout(variable_seq_lengths=True)),
    "deallocated outputs": (2, Layout(deallocate=True)),
    "frozen first stage": (2, Layout(tied=False, frozen_stages=(0,))),
}


def _train(layout: Layout, steps: int) -> list[float]:
    """Return the mean loss of each step; on ranks without a loss, an empty list."""
    training = build(layout)
    records = [training.step() for _ in range(steps)]
    assert all(record.updated and record.grad_norm > 0 for record in records)
    totals = (sum(loss["lm loss"] for loss in record.losses) for record in records if record.losses)
    return [(total[0] / total[1]).item() for total in totals]


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_trains(name: str) -> None:
    """Every layout takes steps, and only its last stage has losses, near those of a uniform guess."""
    n, layout = LAYOUTS[name]
    losses = run_on_ranks(_train, n, layout, 2)

    assert losses[0] == []
    assert len(losses[-1]) == 2
    assert all(abs(loss - torch.tensor(float(layout.vocab)).log()) < 0.2 for loss in losses[-1])


@pytest.mark.ranks
def test_a_deeper_model_trains_after_a_shallow_one() -> None:
    """Megatron's sums of expert losses, one per layer, do not reach from one test into the next."""
    for layers in (2, 4):
        losses = run_on_ranks(_train, 2, Layout(moe=True, layers=layers), 1)
        assert len(losses[-1]) == 1


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.ranks
def test_a_trained_model_leaves_no_threads_behind() -> None:
    """Megatron's overlapped data parallelism keeps itself alive, and its groups' threads with it; not here."""
    run_on_ranks(_train, 4, OVERLAPPED, 1)
    before = run_on_ranks(_threads, 4)
    run_on_ranks(_train, 4, OVERLAPPED, 1)
    after = run_on_ranks(_threads, 4)

    assert max(after) <= max(before) + 4  # a group's own threads may still be ending


@pytest.mark.ranks
def test_a_model_learns() -> None:
    """On one batch repeated, the loss falls: gradients reach the first stage and the optimizer steps."""
    first, *_, last = run_on_ranks(_learn, 2)[-1]

    assert last < 0.9 * first


def _learn() -> list[float]:
    training = build(Layout(dropout=0.0))
    training.iterators = [None if each is None else _repeated(training.layout) for each in training.iterators]
    records = [training.step() for _ in range(12)]
    return [float(record.losses[0]["lm loss"][0]) for record in records if record.losses]


def _repeated(layout: Layout) -> Any:
    batch = next(batches(layout, 1))
    while True:
        yield batch


@pytest.mark.ranks
def test_the_same_seed_gives_the_same_bits() -> None:
    """Two processes that never met train to the same losses; another seed gives others."""
    first = run_on_ranks(_train_seeded, 2, 1, fresh=True)

    assert first == run_on_ranks(_train_seeded, 2, 1, fresh=True)
    assert first != run_on_ranks(_train_seeded, 2, 2)


def _train_seeded(seed: int) -> list[float]:
    training = build(Layout(), seed)
    return [float(loss["lm loss"][0]) for _ in range(2) for loss in training.step().losses[:1]]


@ranks(2)
def test_dropout_is_on() -> None:
    """The same forward twice gives two losses, and with dropout off the same one."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for dropout, alike in ((0.1, False), (0.0, True)):
        training = build(Layout(dropout=dropout))
        training.iterators = [None if each is None else _repeated(training.layout) for each in training.iterators]
        losses = get_forward_backward_func()(**training.schedule_arguments(forward_only=True))
        same = [float(loss["lm loss"][0]) for loss in losses]
        assert not same or (len(set(same)) == 1) == alike


@ranks(2)
def test_tied_weights_stay_tied() -> None:
    """After steps the first stage's embedding equals the last stage's output layer, to the bit."""
    training = build(Layout())
    for _ in range(2):
        training.step()
    (weight,) = (each for name, each in training.chunks[0].named_parameters() if "word_emb" in name or "output" in name)
    both = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(both, weight.detach())

    assert torch.equal(*both)


@ranks(4)
def test_a_frozen_stage_does_not_move() -> None:
    """Parameters of a frozen stage keep their bits, those of the other stage do not."""
    training = build(Layout(tied=False, frozen_stages=(0,)))
    before = [parameter.detach().clone() for parameter in training.chunks[0].parameters()]
    training.step()
    moved = [not torch.equal(old, new) for old, new in zip(before, training.chunks[0].parameters(), strict=True)]

    assert any(moved) == (dist.get_rank() >= 2)


def test_batches_are_endless_and_their_own() -> None:
    """Drawing data moves no default generator, and data ranks see different data."""
    state = torch.get_rng_state()
    first, again, other = (next(batches(Layout(), 1, rank)) for rank in (0, 0, 1))

    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first["tokens"], again["tokens"])
    assert not torch.equal(first["tokens"], other["tokens"])
    assert torch.equal(first["tokens"][:, 1:], first["labels"][:, :-1])


def test_variable_lengths_vary() -> None:
    """Microbatches of one step have different lengths, the same in every step."""
    layout = Layout(variable_seq_lengths=True)
    lengths = [batch["tokens"].shape[1] for batch in islice(batches(layout, 1), 2 * layout.num_microbatches)]

    assert len(set(lengths)) > 1
    assert lengths[: layout.num_microbatches] == lengths[layout.num_microbatches :]


def test_token_loss_is_the_sum_over_unmasked_tokens() -> None:
    """The three parts are what Megatron's own pretraining script returns."""
    losses = cross_entropy(torch.randn(6, 5), torch.arange(6) % 5, reduction="none").view(2, 3)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    total, tokens, logged = models.token_loss(mask, losses)

    assert torch.equal(total, (losses * mask).sum())
    assert tokens.item() == 3
    assert torch.equal(logged["lm loss"], torch.stack([total, torch.tensor(3.0)]))


@pytest.mark.slow
@pytest.mark.ranks
def test_fused_functions_are_compiled_for_real() -> None:
    """With ``jit`` Inductor compiles Megatron's fused functions, into caches of each rank's own."""
    compiled = run_on_ranks(_compiled, 2, fresh=True, jit=True, timeout=280)

    assert all(files > 0 for files in compiled)
    assert run_on_ranks(_compiled, 2, fresh=True) == [0, 0]


def _compiled() -> int:
    """Train a step and count the files in this rank's compile cache."""
    build(Layout(layers=2)).step()
    return sum(path.is_file() for path in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*"))
