"""Megatron's DistributedDataParallel: what its bucket groups count and remember (0.14 to 0.19)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

COUNTED = (
    "params_with_grad",  # a set, up to 0.15
    "per_param_grad_ready_counts",  # dicts, from 0.16
    "golden_per_param_grad_ready_counts",
)
REMEMBERED = (
    "is_last_microbatch",
    "grad_reduce_handle",
    "is_first_batch",  # from 0.16
    "grad_reduce_finished",  # from 0.18
)
GATHERED = {"param_gather_dispatched": True, "param_gather_handle": None}


def bucket_groups(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """Yield the bucket groups of every DDP wrapper among *modules*, those of experts included."""
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            yield from module.bucket_groups
            yield from module.expert_parallel_bucket_groups


def bucket_fields(group: Any) -> dict[str, Any]:
    """Return what a pass may use up of one bucket group, as it is to be lent.

    Counters are copied, flags and handles lent as they are. A group that overlaps its parameter
    gathers is told that they are done: `finish_param_sync`, which DDP's forward pre-hooks call,
    then neither dispatches a gather nor waits for one.
    """
    fields = {name: copy.copy(vars(group)[name]) for name in COUNTED if name in vars(group)}
    fields |= {name: vars(group)[name] for name in REMEMBERED if name in vars(group)}
    return fields | (GATHERED if group.ddp_config.overlap_param_gather else {})
