"""Fine-grained offloading of activations, which plans from the first pass it sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import lent


@contextmanager
def activation_offload(call: ScheduleCall) -> Iterator[None]:
    """Run the pass without offloading, and let the real step be the first that is seen.

    Changed by: the first forward, whose order of layers becomes the plan, and which marks the parameters
        and notes on the model that it did (the guard ``fields`` has both). A single chunk of several is
        no whole plan: its backward would find nothing to load.
    Put back by: lending the manager away, with a class that makes no chunk handler; then the
        old manager.
    Missed by: an assertion in the backward of step 0, which finds one chunk more than it runs; an
        ``empty_cache`` when the pass's own manager dies, in the middle of training.
    """
    with ExitStack() as kept:
        kept.enter_context(lent(megatron.offload_plan()))
        kept.callback(megatron.quiet_offload_pool)
        yield
