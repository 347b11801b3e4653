"""The largest attention logits since the last optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import entries_kept


@contextmanager
def qk_clip(call: ScheduleCall) -> Iterator[None]:
    """Keep the maxima by which QK-clip decides whether to scale weights down.

    Changed by: every attention forward, which takes the larger of the old maximum and its own.
    Put back by: the old tensor, or None; the forward makes a new tensor each time.
    Missed by: the weights after step 0: a maximum of made-up activations can clip them.
    """
    with entries_kept(map(vars, megatron.attention_maxima(call.modules())), ("current_max_attn_logits",)):
        yield
