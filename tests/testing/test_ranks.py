"""Test bodies run on several processes, and their failures are told."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pp_free_warmup.testing._ranks import ranks


@ranks(2)
def test_ranks_form_one_world() -> None:
    """Every rank takes part in a collective of the whole world."""
    total = torch.ones(1)
    dist.all_reduce(total)

    assert total == 2
