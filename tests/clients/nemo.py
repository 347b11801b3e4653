"""NeMo-RL's policy worker in short: one function fetches the schedule, for log-probs and for training.

Written after NeMo-RL ``7ea279ab``, ``models/megatron/{train,data}.py`` and its worker: a generator of processed
microbatches, one wrapped module and no list, post-processing by objects, the reference policy by other weights in
the same model. Its loss is a masked negative log-likelihood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from pp_free_warmup.testing import models
from pp_free_warmup.testing.models import Layout


@dataclass
class ProcessedMicrobatch:
    """What its generator makes of a slice of the batch.

    Attributes:
        data_dict: The slice.
        input_ids: Its tokens, cut to the longest sample.
        position_ids: Theirs.
        attention_mask: None where it is causal.
    """

    data_dict: dict[str, Any]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None


def rollout(layout: Layout, number: int) -> dict[str, torch.Tensor]:
    """Make up a batch of ragged samples."""
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(4, layout.seq, (12,), generator=generator).sort().values
    tokens = torch.randint(1, layout.vocab, (12, layout.seq), generator=generator)
    mask = torch.arange(layout.seq) < lengths[:, None]
    return {"input_ids": tokens * mask, "input_lengths": lengths, "token_mask": mask.float()}


def microbatches(batch: dict[str, torch.Tensor], budget: int) -> list[list[int]]:
    """Say which samples go together: as many as the budget of tokens, padded, holds."""
    groups: list[list[int]] = [[]]
    for sample, length in enumerate(batch["input_lengths"].tolist()):
        if groups[-1] and length * (len(groups[-1]) + 1) > budget:
            groups.append([])
        groups[-1].append(sample)
    return groups


def processed(batch: dict[str, torch.Tensor], groups: list[list[int]]) -> Iterator[ProcessedMicrobatch]:
    """Generate the microbatches, as their worker does."""
    for samples in groups:
        part = {name: value[samples] for name, value in batch.items()}
        longest = int(part["input_lengths"].max())
        tokens = part["input_ids"][:, :longest]
        yield ProcessedMicrobatch(part, tokens, torch.arange(longest).expand_as(tokens), None)


class LogprobsPostProcessor:
    """Return log-probs, for a call without a backward."""

    def __call__(self, data_dict: dict[str, Any]) -> Callable[[torch.Tensor], Any]:
        def process(output: torch.Tensor) -> Any:
            picked = _log_probs(output, data_dict)
            return torch.tensor(0.0), {"logprobs": torch.nn.functional.pad(picked, (1, 0))}

        return process


class LossPostProcessor:
    """Return the loss over all valid tokens of the global batch; undo the schedule's mean over microbatches."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, data_dict: dict[str, Any], global_valid_toks: torch.Tensor) -> Callable[[torch.Tensor], Any]:
        def process(output: torch.Tensor) -> Any:
            picked = _log_probs(output, data_dict)
            loss = -(picked * data_dict["token_mask"][:, 1 : picked.shape[1] + 1]).sum() / global_valid_toks
            return loss * self.number, {"loss": loss.item()}

        return process


def _log_probs(output: torch.Tensor, data_dict: dict[str, Any]) -> torch.Tensor:
    targets = data_dict["input_ids"][:, 1 : output.shape[1]]
    return torch.log_softmax(output[:, :-1].float(), -1).gather(2, targets.unsqueeze(2)).squeeze(2)


def forward_with_post_processing_fn(
    data_iterator: Iterator[ProcessedMicrobatch],
    model: Any,
    post_processing_fn: Any,
    global_valid_toks: torch.Tensor | None = None,
) -> Any:
    """Run one microbatch."""
    microbatch = next(data_iterator)
    output = model(
        input_ids=microbatch.input_ids, position_ids=microbatch.position_ids, attention_mask=microbatch.attention_mask
    )
    more = {} if global_valid_toks is None else {"global_valid_toks": global_valid_toks}
    return output, post_processing_fn(data_dict=microbatch.data_dict, **more)


def megatron_forward_backward(
    model: Any,
    data_iterator: Iterator[ProcessedMicrobatch],
    num_microbatches: int,
    seq_length: int,
    mbs: int,
    post_processing_fn: Any,
    forward_only: bool = False,
    global_valid_toks: torch.Tensor | None = None,
) -> Any:
    """Fetch the schedule and call it: the one place that all of NeMo-RL's policy calls go through."""
    forward_step = partial(
        forward_with_post_processing_fn, post_processing_fn=post_processing_fn, global_valid_toks=global_valid_toks
    )
    forward_backward_func = get_forward_backward_func()
    return forward_backward_func(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=mbs,
        decoder_seq_length=seq_length,
        forward_only=forward_only,
    )


class PolicyWorker:
    """The part of its worker that computes; *call* is `megatron_forward_backward`, decorated or not."""

    def __init__(self, layout: Layout, call: Callable[..., Any] = megatron_forward_backward) -> None:
        self.layout = layout
        self.call = call
        self.training = models.build(layout)
        self.model = self.training.chunks[0]
        self.reference = {name: value.clone() for name, value in self.model.state_dict().items() if value is not None}
        self.trace: list[bytes] = []

    def get_logprobs(self, batch: dict[str, torch.Tensor]) -> None:
        """Compute log-probs of a batch, forward only."""
        self.model.eval()
        with torch.no_grad():
            told = self._call(batch, LogprobsPostProcessor(), forward_only=True)
        self.trace += [entry["logprobs"].numpy().tobytes() for entry in told]

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """Lend the model the reference's weights."""
        own = {name: self.model.state_dict()[name].clone() for name in self.reference}
        self.model.load_state_dict(self.reference, strict=False)
        try:
            yield
        finally:
            self.model.load_state_dict(own, strict=False)

    def train(self, batch: dict[str, torch.Tensor]) -> None:
        """Take one training step."""
        self.model.train()
        self.training.zero_grad()
        number = len(microbatches(batch, 2 * self.layout.seq))
        tokens = batch["token_mask"].sum()
        told = self._call(batch, LossPostProcessor(number), forward_only=False, global_valid_toks=tokens)
        _, norm, _ = self.training.optimizer.step()
        self.trace += [f"{told} {norm}".encode()]
        self.trace += [parameter.detach().numpy().tobytes() for parameter in self.model.parameters()]

    def _call(self, batch: dict[str, torch.Tensor], then: Any, **more: Any) -> Any:
        groups = microbatches(batch, 2 * self.layout.seq)
        data = processed(batch, groups)
        return self.call(self.model, data, len(groups), self.layout.seq, max(map(len, groups)), then, **more)
