"""A small RL actor: slime's and miles' iterators, packed batches and order of calls, in their forms.

Per rollout: log-probs of the reference and of the actor, forward only and in evaluation mode, then
training steps on the same data. Written after slime ``624b824a`` and miles ``31f1ca96``,
``backends/megatron_utils/{data,model}.py``.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from eager import eager_attention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from replays import STAGE, Replay, hang_on_routers, staged

from pp_free_warmup import in_warmup
from pp_free_warmup.testing import models
from pp_free_warmup.testing.models import Layout

KEYS = ("tokens", "loss_masks", "total_lengths")
NUM_MICROBATCHES = (4, 2)
PAD = 4


class ByIndices:
    """slime's ``DataIterator``: samples per microbatch are listed, and the offset counts microbatches."""

    def __init__(self, rollout_data: dict[str, Any], micro_batch_indices: list[list[int]]) -> None:
        self.rollout_data = rollout_data
        self.micro_batch_indices = micro_batch_indices
        self.offset = 0

    def get_next(self, keys: Any) -> dict[str, Any]:
        """Return the next microbatch's samples, as lists."""
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        return {key: [self.rollout_data[key][i] for i in indices] for key in keys}

    def reset(self) -> ByIndices:
        """Start from the first microbatch again."""
        self.offset = 0
        return self

    @property
    def end(self) -> int:
        """The offset after the last microbatch."""
        return len(self.micro_batch_indices)


class BySize(ByIndices):
    """miles' ``DataIterator`` with a fixed microbatch size: the offset counts samples."""

    micro_batch_size = 2

    def get_next(self, keys: Any) -> dict[str, Any]:
        """Return the next samples, as lists."""
        start = self.offset
        self.offset += self.micro_batch_size
        if self.offset > self.end:
            raise IndexError("the rollout is over")
        return {key: self.rollout_data[key][start : self.offset] for key in keys}

    @property
    def end(self) -> int:
        """The offset after the last sample."""
        return len(self.rollout_data["tokens"])


def rollout(layout: Layout, number: int, kind: type[ByIndices]) -> list[ByIndices]:
    """Make up the data of one rollout: ragged samples; one iterator per virtual stage over shared data."""
    generator = torch.Generator().manual_seed(number)
    microbatches = sum(NUM_MICROBATCHES)
    lengths = torch.randint(3, 13, (2 * microbatches,), generator=generator).tolist()
    data = {
        "tokens": [torch.randint(0, layout.vocab, (n,), generator=generator) for n in lengths],
        "loss_masks": [torch.ones(n) for n in lengths],
        "total_lengths": lengths,
    }
    order = torch.randperm(2 * microbatches, generator=generator).view(-1, 2).tolist()
    return [kind(data, order) for _ in range(layout.vp or 1)]


def get_batch(iterator: ByIndices) -> dict[str, Any]:
    """Pack the next samples into one padded row ``[1, T]``; every stage and chunk does so."""
    batch = iterator.get_next(KEYS)
    assert len(iterator.rollout_data["tokens"]) >= len(batch["tokens"])
    batch["unconcat_tokens"] = batch["tokens"]
    tokens = torch.cat(batch["tokens"])
    missing = -len(tokens) % PAD
    batch["tokens"] = torch.nn.functional.pad(tokens, (0, missing)).unsqueeze(0)
    batch["full_loss_masks"] = torch.nn.functional.pad(torch.cat(batch["loss_masks"]), (0, missing)).unsqueeze(0)
    batch["packed_seq_params"] = _packed([*batch["total_lengths"], missing])
    return batch


def _packed(lengths: list[int]) -> PackedSeqParams:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))


@dataclass
class Trace:
    """What an actor computed; equal traces are equal runs, to the bit.

    Attributes:
        numbers: Log-probs and losses as bytes, per microbatch, in order; empty but on the last stage.
        parameters: A digest of all parameters after every training step.
        batches: The lengths of the packed batches that real calls read.
    """

    numbers: list[bytes] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)


class Actor:
    """A model in RL training.

    Args:
        layout: Of the model; lengths vary.
        flavour: ``"slime"`` or ``"miles"``: how log-probs come back from a forward-only call.
        replaying: Train on the experts that the log-probs' call chose.
    """

    def __init__(self, layout: Layout, flavour: str, *, replaying: bool = False) -> None:
        self.layout = layout
        self.flavour = flavour
        self.training = models.build(layout)
        self.replays: list[Replay] = hang_on_routers(self.training.chunks) if replaying else []
        self.trace = Trace()
        self.progress = 0
        self.counted = threading.local()  # neither a warmup nor its verification looks into a thread's own
        self.counted.passes = 0

    @property
    def passes(self) -> int:
        """Count the forward steps inside a warmup."""
        return int(self.counted.passes)

    def forward_step(self, then: Callable[..., Any], iterator: Any, model: Any) -> Any:
        """Run one microbatch; *then* is what the last stage does with the output."""
        batch = get_batch(iterator)
        self.progress += 1  # their progress bar
        if in_warmup():
            self.counted.passes += 1
        else:
            self.trace.batches.append(batch["tokens"].shape[1])
        stage = "replay_forward" if self.replays and torch.is_grad_enabled() else os.environ.get(STAGE, "fallthrough")
        with staged(stage):
            output = model(
                input_ids=batch["tokens"],
                position_ids=torch.arange(batch["tokens"].shape[1]).unsqueeze(0),
                attention_mask=None,
                labels=None,
                packed_seq_params=batch["packed_seq_params"],
                loss_mask=batch["full_loss_masks"],
            )
        return output, partial(then, batch)

    def log_probs(self, batch: dict[str, Any], output: torch.Tensor, non_loss_data: bool = False) -> Any:
        """Collect what a forward-only call is for: a dict of lists, one entry per sample."""
        logits = torch.log_softmax(output[0, : sum(batch["total_lengths"])].float(), dim=-1)
        picked = logits.gather(1, torch.cat(batch["unconcat_tokens"]).unsqueeze(1)).squeeze(1)
        result = {"log_probs": list(picked.split(batch["total_lengths"]))}
        return result if non_loss_data else (torch.empty((0,)), result)

    def loss(self, batch: dict[str, Any], output: torch.Tensor) -> Any:
        """Compute a policy loss of sorts, in the three-part form of both frameworks."""
        losses = torch.logsumexp(output[0].float(), dim=-1) * batch["full_loss_masks"][0]
        tokens = batch["full_loss_masks"].sum().to(torch.int)
        self._keep(losses)
        return losses.sum(), tokens, {"keys": ["loss"], "values": torch.stack([tokens.float(), losses.sum().detach()])}

    def forward_only(self, iterators: list[ByIndices], stage: str = "fallthrough") -> None:
        """Compute log-probs of a rollout: evaluation mode, no timers, one schedule call per step."""
        for iterator in iterators:
            iterator.reset()
        chunks = self.training.chunks
        for chunk in chunks:
            chunk.eval()
        self.training.config.timers = None
        for number in NUM_MICROBATCHES:
            more = {"collect_non_loss_data": True} if self.flavour == "miles" else {}
            with torch.no_grad(), staged(stage):
                stored = self._schedule(self.log_probs, iterators, number, forward_only=True, **more)
            for entry in stored:
                self._keep(*entry["log_probs"])
        for chunk in chunks:
            chunk.train()

    def train(self, iterators: list[ByIndices]) -> None:
        """Take one training step per entry of `NUM_MICROBATCHES`."""
        for iterator in iterators:
            iterator.reset()
        for number in NUM_MICROBATCHES:
            self.training.zero_grad()
            with staged("replay_backward" if self.replays else "fallthrough"):  # where layers are computed again
                self._schedule(self.loss, iterators, number, forward_only=False, decoder_seq_length=None)
            self.training.optimizer.step()
            self.trace.parameters.append(self._digest())

    def _schedule(self, then: Callable[..., Any], iterators: list[ByIndices], number: int, **more: Any) -> Any:
        with eager_attention():
            return get_forward_backward_func()(
                forward_step_func=partial(self.forward_step, then),
                data_iterator=iterators,
                model=self.training.chunks,
                num_microbatches=number,
                seq_length=self.layout.seq,
                micro_batch_size=1,
                **more,
            )

    def _keep(self, *values: torch.Tensor) -> None:
        if not in_warmup():
            self.trace.numbers.extend(value.detach().numpy().tobytes() for value in values)

    def _digest(self) -> str:
        digest = hashlib.sha1(usedforsecurity=False)
        for chunk in self.training.chunks:
            for parameter in chunk.parameters():
                digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()
