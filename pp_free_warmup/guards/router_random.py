"""Random numbers that a router keeps for itself when its load is forced to be balanced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import lent


@contextmanager
def router_random(_call: ScheduleCall) -> Iterator[None]:
    """Keep the routers' own generator where it is, and biases undrawn that are drawn once per layer.

    Changed by: a forward with ``moe_router_force_load_balancing`` or ``moe_router_force_biased``.
    Put back by: lending a generator in the same state and a copy of the biases.
    Missed by: the loss of step 0, in a run with either option.
    """
    with lent(megatron.router_generators()):
        yield
