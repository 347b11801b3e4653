"""Compare everything a warmup could have touched before and after it, and stop the run if something changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._report import Stopwatch
from pp_free_warmup._state_walk import StateWalk
from pp_free_warmup._trace import changes, observed
from pp_free_warmup.errors import TraceFound

SHOWN = 40


@contextmanager
def verified(call: ScheduleCall, optimizer: Any, stopwatch: Stopwatch) -> Iterator[None]:
    """Compare the whole reachable state after the block with that before it.

    Copies every tensor to the host and hashes it, twice: for a test run, not for every day. What
    fetching the first batch changed, as it would have without a warmup, may differ: random states
    that it drew from, and every field that was another one after a fetch than before it.

    Args:
        call: The call whose model, config, forward step, data and random state are looked at.
        optimizer: Its state is looked at as well; None for none.
        stopwatch: Receives the seconds, as phase ``verify``.

    Raises:
        TraceFound: Something differs; its text names every path, up to forty of them.
    """
    keywords, fetched = call.keywords, set[str]()
    look = partial(observed, call.chunks, optimizer, keywords["forward_step_func"], keywords["data_iterator"])
    with stopwatch.measure("verify"):
        before = look()
    call.random.around.append(partial(_noting_fetched, fetched, partial(look, _version), stopwatch))
    yield
    with stopwatch.measure("verify"):
        after = look()
        fields = {path: text for path, text in after.fields.items() if path not in fetched}
        kept = {path: text for path, text in before.fields.items() if path not in fetched}
        changed = changes(kept, fields, RANDOM if call.random.draws else ())
    if changed:
        raise _trace_found(changed)


@contextmanager
def _noting_fetched(paths: set[str], look: Callable[[], StateWalk], stopwatch: Stopwatch) -> Iterator[None]:
    """Note which paths the block changes: it fetches a batch."""
    with stopwatch.measure("verify"):
        before = look()
    try:
        yield
    finally:
        with stopwatch.measure("verify"):
            after = look().fields
            paths |= {path for path in {*before.fields, *after} if before.fields.get(path) != after.get(path)}


def _version(tensor: torch.Tensor) -> str:
    """Stand for a tensor's values where hashing them at each fetch would take too long."""
    return "inference" if tensor.is_inference() else str(tensor._version)


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
