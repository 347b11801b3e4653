"""Where model chunks lie, by what they say of themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pp_free_warmup._megatron.groups import Groups
from pp_free_warmup._megatron.schedule import is_first, is_last, unwrapped


def out_of_place(chunks: Sequence[torch.nn.Module], groups: Groups) -> str:
    """Name a chunk that lies elsewhere than Megatron's interleaved schedule puts it, such as in a V; or return "".

    Chunks are asked only for what they say they *do*: embed (``pre_process``) or score (``post_process``).
    One that says it does not may be in its place all the same: reward models have a head of their own.

    Args:
        chunks: This rank's chunks; a single one has only one place to be in.
        groups: The groups of the call.
    """
    count = len(chunks)
    for index, chunk in enumerate(chunks if count > 1 else ()):
        inner = unwrapped(chunk)
        if getattr(inner, "pre_process", None) is True and not is_first(groups, index, count):
            return f"chunk {index} has pre_process=True, but is not the first one of Megatron's interleaved schedule"
        if getattr(inner, "post_process", None) is True and not is_last(groups, index, count):
            return f"chunk {index} has post_process=True, but is not the last one of Megatron's interleaved schedule"
    return ""
