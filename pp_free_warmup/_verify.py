"""Compare everything a warmup could have touched before and after it, and stop the run if something changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._report import Stopwatch
from pp_free_warmup._trace import changes, observed
from pp_free_warmup.errors import TraceFound

SHOWN = 40


@contextmanager
def verified(call: ScheduleCall, optimizer: Any, stopwatch: Stopwatch) -> Iterator[None]:
    """Compare the whole reachable state after the block with that before it.

    Copies every tensor to the host and hashes it, twice: for a test run, not for every day. Where
    fetching the first batch drew random numbers, as it would have without a warmup, those may differ.

    Args:
        call: The call whose model, config, forward step and random state are looked at.
        optimizer: Its state is looked at as well; None for none.
        stopwatch: Receives the seconds, as phase ``verify``.

    Raises:
        TraceFound: Something differs; its text names every path, up to forty of them.
    """
    step = call.keywords["forward_step_func"]
    with stopwatch.measure("verify"):
        before = observed(call.chunks, optimizer, step)
    yield
    with stopwatch.measure("verify"):
        after = observed(call.chunks, optimizer, step)
        changed = changes(before.fields, after.fields, RANDOM if call.random.draws else ())
    if changed:
        raise _trace_found(changed)


RANDOM = ("random.*", "megatron.core.tensor_parallel.random:_CUDA_RNG_STATE_TRACKER*")


def _trace_found(changed: list[str]) -> TraceFound:
    more = f"\n  and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    listed = "\n".join(changed[:SHOWN])
    return TraceFound(
        f"The warmup left a trace in {len(changed)} place(s).",
        found=f"\n{listed}{more}\n  expected every field as it was before the pass.",
        matters="A run with the warmup may not be the run without it.",
        do="Guard that state with extra_guards=[...] (see pp_free_warmup.guards), or report it if it is Megatron's.",
    )
