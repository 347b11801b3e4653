"""Weight gradients that are computed later than the backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import Queue

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import _transformer_engine as te
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import emptied, entries_kept, lent


@contextmanager
def deferred_wgrad(call: ScheduleCall) -> Iterator[None]:
    """Leave no gradient of the warmup to be computed by the real step.

    Changed by: the output layer under ``defer_embedding_wgrad_compute`` (activations in the forward,
        gradients in the backward), layers under ``delay_wgrad_compute``, and every layer of a
        combined step, which keeps what would compute them.
    Put back by: emptying the lists for the pass, lending an empty queue, then the old contents.
    Missed by: an assertion at the end of the first step, which clears one of the two lists only;
        gradients that contain the warmup's.
    """
    modules = list(megatron.with_fused_parts(call.modules()))
    with ExitStack() as kept:
        for buffer in list(megatron.deferred_embeddings(modules)):
            kept.enter_context(emptied(buffer))
        kept.enter_context(lent((store, "context", Queue()) for store in te.delayed_weight_gradients(modules)))
        kept.enter_context(entries_kept(map(vars, modules), ("backward_dw_wrapper",)))
        yield
