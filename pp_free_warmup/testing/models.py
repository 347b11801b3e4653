"""Tiny real Megatron models, for tests of guards, losses and layouts of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pp_free_warmup.testing._layout import Layout

__all__ = ["Layout", "StepRecord", "Training", "batches", "build", "forward_step", "parallel", "token_loss"]

Batch = dict[str, torch.Tensor]
Schedule = Callable[..., Any]


def parallel(pp: int = 1, vp: int | None = None, tp: int = 1, ep: int = 1, *, seed: int = 1) -> None:
    """Start Megatron's process groups and random number tracker on this rank.

    ``torch.distributed`` must be running; the rest of the world's ranks are data-parallel.
    """
    from pp_free_warmup.testing._chunks import start_parallel

    start_parallel(Layout(pp=pp, vp=vp, tp=tp, ep=ep, moe=ep > 1), seed)


def batches(layout: Layout, seed: int, data_rank: int = 0) -> Iterator[Batch]:
    """Iterate over an endless stream of microbatches, drawn from a generator of its own.

    Yields:
        ``tokens``, ``labels``, ``position_ids`` and ``loss_mask``, each ``[micro_batch, length]``.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + data_rank)
    number = 0
    while True:
        shape = (layout.micro_batch, layout.length(number % layout.num_microbatches) + 1)
        drawn = torch.randint(0, layout.vocab, shape, generator=generator).to(layout.device)
        tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
        mask = torch.ones(tokens.shape, device=tokens.device)
        yield {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": mask}
        number += 1


def token_loss(mask: Any, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum a microbatch's token losses, in the three-part form of Megatron's ``pretrain_gpt.py``."""
    total = (losses.float() * mask).sum()
    tokens = mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach().clone(), tokens.float()])}


def forward_step(
    iterator: Iterator[Batch] | None, chunk: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """Run one microbatch through *chunk*: a ``forward_step_func`` as a trainer writes it.

    With *return_schedule_plan* the forward is only planned, for Megatron's combined steps.
    """
    batch: dict[str, Any] = {} if iterator is None else next(iterator)
    run = chunk.build_schedule_plan if return_schedule_plan else chunk
    output = run(batch.get("tokens"), batch.get("position_ids"), None, labels=batch.get("labels"))
    return output, partial(token_loss, batch.get("loss_mask"))  # called on the last stage only, which has a mask


@dataclass(frozen=True)
class StepRecord:
    """What a trainer sees of one step.

    Attributes:
        losses: What the schedule returned: one entry per microbatch on the last stage, else none.
        grad_norm: The gradient norm before clipping; None where a loss scale overflowed.
        updated: Whether the optimizer took the step.
    """

    losses: list[dict[str, torch.Tensor]]
    grad_norm: float | None
    updated: bool


@dataclass
class Training:
    """A model in training on this rank.

    Attributes:
        layout: What it was built from.
        chunks: This rank's model chunks, wrapped, in virtual-stage order.
        optimizer: Megatron's optimizer.
        iterators: Where data comes from, one per chunk; None where a chunk needs none.
        forward_step: The ``forward_step_func``.
    """

    layout: Layout
    chunks: list[Any]
    optimizer: Any
    iterators: list[Any]
    forward_step: Callable[..., Any] = field(default=forward_step)

    @property
    def config(self) -> Any:
        """Megatron's config, one object for all chunks."""
        return self.chunks[0].config

    def schedule_arguments(self, iterator: Any = None, *, forward_only: bool = False) -> dict[str, Any]:
        """Return the keyword arguments of one call of Megatron's schedule.

        Args:
            iterator: What to pass as ``data_iterator`` instead of the training's own.
            forward_only: Ask for no backward.
        """
        own = self.iterators if self.layout.vp else self.iterators[0]
        return {
            "forward_step_func": self.forward_step,
            "data_iterator": own if iterator is None else iterator,
            "model": self.chunks if self.layout.vp else self.chunks[0],
            "num_microbatches": self.layout.num_microbatches,
            "seq_length": self.layout.seq,
            "micro_batch_size": self.layout.micro_batch,
            "decoder_seq_length": self.layout.seq,
            "forward_only": forward_only,
        }

    def step(self, schedule: Schedule | None = None) -> StepRecord:
        """Take one training step: zero, schedule, optimizer.

        Args:
            schedule: The schedule function; by default the one Megatron chooses now.
        """
        if schedule is None:
            from megatron.core.pipeline_parallel import get_forward_backward_func

            schedule = get_forward_backward_func()
        self.zero_grad()
        losses = schedule(**self.schedule_arguments())
        updated, norm, _ = self.optimizer.step()
        return StepRecord(losses, None if norm is None else float(norm), bool(updated))

    def zero_grad(self) -> None:
        """Zero all gradients, as a trainer does before each step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()


def build(layout: Layout, seed: int = 1, *, step: Callable[..., Any] = forward_step) -> Training:
    """Start Megatron's groups for *layout* and build its model and optimizer on this rank.

    The same *layout* and *seed* give the same bits, in any process.

    Args:
        layout: What to build; ``torch.distributed`` must have a world that it fits.
        seed: Seeds weights, dropout and data.
        step: The ``forward_step_func``.
    """
    from megatron.core import parallel_state

    from pp_free_warmup.testing._chunks import build_chunks, build_optimizer, start_parallel

    if not parallel_state.model_parallel_is_initialized():
        start_parallel(layout, seed)
    chunks = build_chunks(layout)
    optimizer = build_optimizer(layout, chunks)
    return Training(layout, chunks, optimizer, _iterators(layout, seed), step)


def _iterators(layout: Layout, seed: int) -> list[Any]:
    """Give data to the first and the last chunk of the pipeline, as ``pretrain_gpt.py`` does.

    Where lengths vary every chunk has data, as in slime and verl: the batch tells a stage the length.
    So it has under a layout of one's own, where layers that predict tokens may be in any stage.
    """
    from megatron.core import parallel_state

    data_rank = parallel_state.get_data_parallel_rank()
    rank, chunks = parallel_state.get_pipeline_model_parallel_rank(), layout.vp or 1
    ends = {(0, 0), (layout.pp - 1, chunks - 1)}
    all_of_them = layout.variable_seq_lengths or "pipeline_model_parallel_layout" in layout.options
    given = [all_of_them or (rank, chunk) in ends for chunk in range(chunks)]
    return [batches(layout, seed, data_rank) if each else None for each in given]
