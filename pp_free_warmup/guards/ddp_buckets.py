"""What Megatron's DDP counts per bucket, and which gathers and reductions it thinks are under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import lent


@contextmanager
def ddp_buckets(call: ScheduleCall) -> Iterator[None]:
    """Keep the bookkeeping of gradient reductions, and keep parameter gathers out of the pass.

    A pass needs no up-to-date parameters. With ``overlap_param_gather`` each bucket is therefore
    lent the flag that its gather is done, so none happens, and the flag of the real step stays true
    of the real buffers (a gather shared with MXFP8 gradients zeroes its source: two would gather
    zeros). The forward pre-hooks stay on: code compiled in the pass would not see them come back.

    Changed by: leaving ``no_sync``, which marks a last microbatch; backward hooks; forward pre-hooks.
    Put back by: lending copies of the counters and flags.
    Missed by: gradients that are reduced too early, or an assertion in DDP; parameters not gathered.
    """
    groups = megatron.bucket_groups(call.modules())
    with lent((group, name, value) for group in groups for name, value in megatron.bucket_fields(group).items()):
        yield
