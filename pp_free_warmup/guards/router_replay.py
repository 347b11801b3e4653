"""Recorded and replayed routing choices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._structure import structure_kept
from pp_free_warmup._undo import tensors_kept


@contextmanager
def router_replay(call: ScheduleCall) -> Iterator[None]:
    """Keep what is left to replay, and what was recorded.

    Changed by: a forward that records (into a static buffer if there is one); a recomputed
        forward, which takes the first entry off a list.
    Put back by: copying the static buffer, and keeping every field and the list's contents.
    Missed by: the backward of the first microbatch, which finds the second one's choices or none.
    """
    replays = list(megatron.router_replays(call.reached()))
    buffers = [replay.static_buffer for replay in replays if getattr(replay, "static_buffer", None) is not None]
    with tensors_kept(buffers), structure_kept(*replays):
        yield
