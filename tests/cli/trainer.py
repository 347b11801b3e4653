"""A training script that knows nothing of a warmup; it prints its arguments, and what training made."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from pp_free_warmup.testing import cuda_on_cpu, models
from pp_free_warmup.testing._recording import loss_fields, model_fields

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with cuda_on_cpu():
        training = models.build(models.Layout(pp=2, layers=2, hidden=16, heads=2, seq=8, vocab=32, dropout=0.1))
        steps = [training.step() for _ in range(3)]
        made = [*(loss_fields(step.losses) for step in steps), model_fields(training.chunks)]
    print(f"{dist.get_rank()}: {sys.argv[1:]} {made}\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()
