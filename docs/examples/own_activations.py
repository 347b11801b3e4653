"""Warm a stage that reads token ids from a channel of what arrives: random numbers cannot stand for them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func

from pp_free_warmup import pipeline_warmup
from pp_free_warmup.testing import _chunks, cuda_on_cpu, models

RANKS = 2
LAYOUT = models.Layout(pp=RANKS, layers=2, variable_seq_lengths=True)


class WithIds(GPTModel):
    """Sends token ids along with the hidden states, for an embedding of the last stage's own."""

    def __init__(self, config: Any, **keywords: Any) -> None:
        super().__init__(config=config, **keywords)
        self.input_tensor = None
        self.second_look = torch.nn.Embedding(LAYOUT.vocab, config.hidden_size)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Keep what arrives until the forward takes it apart."""
        self.input_tensor = input_tensor[0]

    def forward(self, input_ids: Any, *given: Any, **named: Any) -> Any:
        """Take the ids off what arrives, or put them onto what is sent."""
        if self.pre_process:
            hidden = super().forward(input_ids, *given, **named)
            return torch.cat([hidden, input_ids.t().unsqueeze(-1).to(hidden.dtype)], -1)
        hidden, ids = self.input_tensor.split([self.config.hidden_size, 1], -1)
        super().set_input_tensor(hidden + self.second_look(ids[..., 0].long()))
        return super().forward(None, *given, **named)


def activations(call: Any, _chunk: int) -> torch.Tensor:
    """Make hidden states with token ids in their last channel, as the first stage sends them."""
    sizes = (LAYOUT.length(0), LAYOUT.micro_batch)
    values = torch.rand(*sizes, call.config.hidden_size + 1)
    values[..., -1] = torch.randint(0, LAYOUT.vocab, sizes)
    return values


def train(rank: int, meeting_point: str) -> None:
    """Take one step on this rank, warmed."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=RANKS)
    with cuda_on_cpu(), mock.patch.object(_chunks, "GPTModel", WithIds):
        training = models.build(LAYOUT)
        with pipeline_warmup(training.chunks, activations=activations, on_failure="raise") as warmup:
            get_forward_backward_func()(**training.schedule_arguments())
    assert (warmup.report.outcome, warmup.report.passes) == ("warmed", 1)
    if rank == 0:
        print(warmup.report)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, args=(f"file://{Path(folder, 'meeting_point')}",), nprocs=RANKS)
