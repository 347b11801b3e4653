"""CUDA graphs, recorded or captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import lent


@contextmanager
def cuda_graphs(call: ScheduleCall) -> Iterator[None]:
    """Run the pass eager, so that nothing is recorded, captured or replayed.

    Changed by: the first forwards, each of which records one graph for one microbatch; a replay,
        which moves on to the next microbatch's graph and writes its static buffers.
    Put back by: lending the graph manager's own eager way as its call, and an empty list of graphs.
    Missed by: the graphs of step 0: one too many, so every later microbatch gets its neighbour's.
    """
    with lent(megatron.graph_slots(call.modules())):
        yield
