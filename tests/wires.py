"""Tiny Megatron models and forward steps whose stages send one another something else than hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams

from pp_free_warmup import _megatron as megatron
from pp_free_warmup.testing import _chunks, models

TEACHER, IMAGE, STREAMS = 12, 10, 2
Loss = Callable[..., Any]


class Sending(GPTModel):
    """A chunk that sees what arrives before the layers do, and adds to what is sent."""

    def __init__(self, config: Any, **keywords: Any) -> None:
        """Build the chunk as usual."""
        super().__init__(config=config, **keywords)
        self.input_tensor = None
        self.extend()

    def extend(self) -> None:
        """Make modules of one's own."""

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Keep what arrived until the forward takes it apart."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def run(self, arrived: Any, *given: Any, **named: Any) -> Any:
        """Run the layers on hidden states."""
        if arrived is not None:
            super().set_input_tensor(arrived)
        return super().forward(*given, **named)


class Distilling(Sending):
    """Student and teacher side by side on the last axis."""

    def extend(self) -> None:
        """Make the teacher."""
        if self.pre_process:
            self.teacher_words = torch.nn.Embedding(self.vocab_size, TEACHER).requires_grad_(False)
        self.teacher = torch.nn.LayerNorm(TEACHER).requires_grad_(False)

    def forward(self, input_ids: Any, position_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        """Run both."""
        student = None
        if self.pre_process:
            teacher = self.teacher_words(input_ids).transpose(0, 1)
        else:
            student, teacher = self.input_tensor.split([self.config.hidden_size, TEACHER], -1)
        teacher = self.teacher(teacher + 1)
        output = self.run(student, input_ids, position_ids, attention_mask, labels=labels)
        if self.post_process:
            return output + 1e-3 * teacher.square().mean(-1).transpose(0, 1)
        return torch.cat([output, teacher], -1)


def widened(receive: Any, send: Any) -> tuple[Any, Any]:
    """Make room for the teacher in what stages exchange: an ``adjust_tensor_shapes_fn``, as distillation has."""
    return tuple(
        [(*shape[:-1], shape[-1] + TEACHER) if shape else shape for shape in given] for given in (receive, send)
    )


class Streaming(Sending):
    """Two residual streams side by side on the last axis."""

    def forward(self, input_ids: Any, position_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        """Mix the streams before the layers."""
        first = None
        if not self.pre_process:
            wide = STREAMS * self.config.hidden_size
            assert self.input_tensor.shape[-1] == wide, f"expected {wide} channels, got {self.input_tensor.shape[-1]}"
            first, second = self.input_tensor.chunk(STREAMS, -1)
            first = first + 0.5 * second
        output = self.run(first, input_ids, position_ids, attention_mask, labels=labels)
        return output if self.post_process else torch.cat([output, 2 * output], -1)


class Stacking(Sending):
    """Residual streams on an axis of their own: ``[sequence, microbatch, streams, hidden]``."""

    def forward(self, input_ids: Any, position_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        """Add the streams up before the layers."""
        arrived = None if self.pre_process else torch.einsum("sbnh->sbh", self.input_tensor)
        output = self.run(arrived, input_ids, position_ids, attention_mask, labels=labels)
        return output if self.post_process else torch.stack([output, 2 * output], 2)


class Seeing(Sending):
    """Image tokens in front of the text, which all later stages count on."""

    def extend(self) -> None:
        """Make the image's place."""
        self.weights = torch.nn.Parameter(torch.linspace(0.5, 1.5, IMAGE + self.max_sequence_length))

    def forward(self, input_ids: Any, position_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        """Put the image in front, or weigh each of all tokens."""
        image, arrived = input_ids.new_zeros(input_ids.shape[0], IMAGE), self.input_tensor
        positions = torch.cat([image, position_ids], 1)
        if not self.pre_process:
            arrived = arrived * self.weights[: positions.shape[1], None, None]
        if self.post_process:
            labels = torch.cat([image, labels], 1)
        output = self.run(arrived, torch.cat([image + 1, input_ids], 1), positions, attention_mask, labels=labels)
        return output[:, IMAGE:] if self.post_process else output


class Demanding(Sending):
    """One channel more, with what no random number may stand for."""

    demand = "ids"

    def extend(self) -> None:
        """Make what looks the ids up."""
        self.looked_up = torch.nn.Embedding(self.vocab_size, self.config.hidden_size)

    def forward(self, input_ids: Any, position_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        """Use the channel as ids, as a mask, or under a root."""
        hidden, channel = None, input_ids.t().unsqueeze(-1).to(self.config.pipeline_dtype)
        if not self.pre_process:
            hidden, channel = self.input_tensor.split([self.config.hidden_size, 1], -1)
            hidden = hidden + DEMANDS[self.demand](self, channel)
        output = self.run(hidden, input_ids, position_ids, attention_mask, labels=labels)
        return output if self.post_process else torch.cat([output, channel], -1)


def _ids(model: Demanding, channel: torch.Tensor) -> torch.Tensor:
    return model.looked_up(channel[..., 0].round().long())


def _mask(_model: Demanding, channel: torch.Tensor) -> torch.Tensor:
    assert bool((channel >= 0).all()), "a mask has no negative entries"
    return channel / 100


def _root(_model: Demanding, channel: torch.Tensor) -> torch.Tensor:
    return (channel + 1).sqrt() / 10


DEMANDS = {"ids": _ids, "mask": _mask, "root": _root}


@contextmanager
def chunks_are(kind: type) -> Iterator[None]:
    """Have `models.build` make chunks of *kind*."""
    with mock.patch.object(_chunks, "GPTModel", kind):
        yield


def preferring_step(iterator: Any, chunk: Any) -> tuple[Any, Loss]:
    """Halve what arrives for reference and policy before the model is called, as preference learning does."""
    batch, inner = next(iterator), megatron.unwrapped(chunk)
    arrived, run = inner.decoder.input_tensor, partial(_run, chunk, batch)
    if arrived is None:
        with torch.no_grad():
            reference = run()
        policy = run()
    else:
        halves = [half.contiguous() for half in arrived.reshape(2, arrived.shape[0] // 2, *arrived.shape[1:])]
        inner.set_input_tensor(halves[0])
        with torch.no_grad():
            reference = run()
        inner.set_input_tensor(halves[1])
        policy = run()
    if not inner.post_process:
        return torch.cat([reference, policy]), models.token_loss
    return policy - 0.5 * reference, partial(models.token_loss, batch["loss_mask"])


def _run(chunk: Any, batch: Any, length: int | None = None) -> Any:
    tokens, positions, labels = (batch[name][:, :length] for name in ("tokens", "position_ids", "labels"))
    return chunk(tokens, positions, None, labels=labels)


def unpaired_step(iterator: Any, chunk: Any) -> tuple[Any, Loss]:
    """Take three parts of two lengths from what arrives: reference, a shorter text for the baseline, policy."""
    batch, inner = next(iterator), megatron.unwrapped(chunk)
    whole = batch["tokens"].shape[1]
    lengths = [whole, whole // 2, whole]
    arrived, made = inner.decoder.input_tensor, []
    parts = [None] * len(lengths) if arrived is None else arrived.split(lengths)
    for part, length, learns in zip(parts, lengths, (False, False, True), strict=True):
        inner.set_input_tensor(part)
        with nullcontext() if learns else torch.no_grad():
            made.append(_run(chunk, batch, length))
    if not inner.post_process:
        return torch.cat(made), models.token_loss
    reference, baseline, policy = made
    return policy - 0.5 * reference - baseline.mean(), partial(models.token_loss, batch["loss_mask"])


def masked_step(iterator: Any, chunk: Any) -> tuple[Any, Loss]:
    """Hand tokens to the first stage, labels to the last, and to those between a mask alone."""
    batch = next(iterator)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    tokens = (batch["tokens"], batch["position_ids"]) if first else (None, None)
    length = batch["tokens"].shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    output = chunk(*tokens, mask, labels=batch["labels"] if last else None)
    return output, partial(models.token_loss, batch["loss_mask"])


def packing_step(iterator: Any, chunk: Any, *, nested: bool) -> tuple[Any, Loss]:
    """Pack the batch on the first stage; hand later ones the ids as they were, nested or dense."""
    batch = next(iterator)
    tokens = batch["tokens"]
    rows = tokens.shape[0]
    ends = torch.arange(rows + 1, dtype=torch.int32) * tokens.shape[1]
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    flat = {name: value.reshape(1, -1) for name, value in batch.items()}
    ids = torch.nested.nested_tensor(list(tokens), layout=torch.jagged) if nested else tokens
    inner = megatron.unwrapped(chunk)
    with mock.patch.object(inner.decoder, "forward", partial(_unpacked, inner.decoder.forward)):
        output = chunk(
            flat["tokens"] if inner.pre_process else ids,
            flat["position_ids"],
            None,
            labels=flat["labels"] if inner.post_process else None,
            packed_seq_params=packed,
        )
    return output, partial(models.token_loss, flat["loss_mask"])


def _unpacked(own: Any, *given: Any, **named: Any) -> Any:
    """Run the layers without the packing, which only fused attention knows."""
    return own(*given, **{**named, "packed_seq_params": None})
