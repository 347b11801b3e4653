"""Megatron-LM's own ``pretrain()`` as a script that knows nothing of a warmup; it prints all that it computed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from pretraining import Job, run

ARGUMENTS = ("--pipeline-model-parallel-size", "2", "--eval-interval", "2", "--eval-iters", "2")

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    [seen] = run(Job(ARGUMENTS, verified=False))
    print(f"{rank}: {seen.trace}\n{rank} passes: {seen.passes}\n", end="", flush=True)
