"""Train a tiny Megatron GPT on two ranks, on the CPU, and warm its pipeline up first."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from pp_free_warmup import pipeline_warmup
from pp_free_warmup.testing import cuda_on_cpu, models

RANKS = 2


def train(rank: int, meeting_point: str) -> None:
    """Take three steps on this rank, the first one warmed."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=RANKS)
    with cuda_on_cpu(jit=True):
        training = models.build(models.Layout(pp=RANKS))
        with pipeline_warmup(training.chunks, training.optimizer) as warmup:
            for step in range(3):
                training.zero_grad()
                losses = get_forward_backward_func()(**training.schedule_arguments())
                training.optimizer.step()
                if losses:  # on the last stage only
                    total, tokens = sum(loss["lm loss"] for loss in losses).tolist()
                    print(f"step {step}: loss {total / tokens:.4f}", flush=True)
        if rank == 0:
            print(warmup.report, flush=True)
    torch.distributed.barrier()  # who closes its sockets first would fail the other
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, args=(f"file://{Path(folder, 'meeting_point')}",), nprocs=RANKS)
