"""What the warmup puts back, one file per concern.

Whatever lies in a field or a container of a module, of a plain object that hangs on one, or of what the
forward step holds, comes back by the one rule of `fields`. A guard is for the rest: state outside
modules, values of tensors, and what has to be out of the way during the pass.

To add a guard:

1. write ``guards/<concern>.py``: one generator of that name that saves, yields and puts back,
   with the three lines "Changed by", "Put back by" and "Missed by" in its docstring;
2. add it to `GUARDS` below, where the order says why;
3. add its case to ``tests/guards/cases.py``;
4. run ``python docs/generated.py``, which adds it to the list of guards in the docs.

Then run ``pytest tests/guards tests/test_docs.py``: it names the step that was forgotten. A guard of
your own, outside this library, goes into ``pipeline_warmup(extra_guards=[...])`` instead.

Four moves only: *lend* another object and give the old one back (``swapped``, ``lent``), *copy* tensors and
write them back in place (``tensors_kept``), *keep* what lies where (``structure_kept``, ``attributes_kept``),
*read and set* (random numbers). Clearing is not putting back. Guards never communicate: ranks may hold
different state, and a collective that only some ranks reach hangs the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from pp_free_warmup._call import Guard, ScheduleCall
from pp_free_warmup._values import keep_parameters
from pp_free_warmup.errors import RestoreFailed, TraceFound
from pp_free_warmup.guards.activation_logs import activation_logs
from pp_free_warmup.guards.activation_offload import activation_offload
from pp_free_warmup.guards.cuda_graphs import cuda_graphs
from pp_free_warmup.guards.ddp_buckets import ddp_buckets
from pp_free_warmup.guards.fields import fields
from pp_free_warmup.guards.fp8_state import fp8_state
from pp_free_warmup.guards.gradients import gradients
from pp_free_warmup.guards.loss_scales import loss_scales
from pp_free_warmup.guards.loss_trackers import loss_trackers
from pp_free_warmup.guards.nvtx_ranges import nvtx_ranges
from pp_free_warmup.guards.paged_stash import paged_stash
from pp_free_warmup.guards.recompute_flags import recompute_flags
from pp_free_warmup.guards.rerun_machine import rerun_machine
from pp_free_warmup.guards.rng import rng
from pp_free_warmup.guards.router_budget import router_budget
from pp_free_warmup.guards.router_random import router_random
from pp_free_warmup.guards.router_replay import router_replay
from pp_free_warmup.guards.router_trace import router_trace
from pp_free_warmup.guards.sequence_statistics import sequence_statistics
from pp_free_warmup.guards.straggler_timer import straggler_timer
from pp_free_warmup.guards.timers import timers
from pp_free_warmup.guards.values import values

__all__ = ["GUARDS", "Guard", "ScheduleCall", "guarded", "keep_parameters"]

Entered = tuple[str, AbstractContextManager[None]]

GUARDS: tuple[Guard, ...] = (
    rng,  # first in, last out: saving and putting back the others may draw numbers
    fields,  # the rule for all modules; before the guards that lend one of their fields
    values,
    gradients,
    ddp_buckets,
    timers,
    rerun_machine,
    loss_scales,
    loss_trackers,
    router_replay,
    router_random,
    router_budget,
    router_trace,
    fp8_state,
    activation_offload,
    paged_stash,
    cuda_graphs,
    recompute_flags,
    sequence_statistics,
    activation_logs,
    straggler_timer,
    nvtx_ranges,
)


@contextmanager
def guarded(call: ScheduleCall, extra: Iterable[Guard] = ()) -> Iterator[None]:
    """Enter every guard, run the block, then put everything back in reverse order.

    Args:
        call: The schedule call whose model, config and random state are guarded.
        extra: The user's own guards, entered after `GUARDS` and so restored before them.

    Raises:
        RestoreFailed: One or more guards could not put their state back. All others did. The first
            failure is the cause; an error of the block itself is the context.
        TraceFound: The pass wrote to something that no guard keeps; all else was put back.
        Exception: What a guard raised while saving, once those entered before it are undone; or
            what the block raised, once all are undone.
    """
    entered: list[Entered] = []
    try:
        for guard in (*GUARDS, *extra):
            manager = guard(call)
            manager.__enter__()
            entered.append((_name_of(guard), manager))
        yield
    except BaseException as error:
        _leave(entered, error)
        raise
    _leave(entered, None)


def _leave(entered: list[Entered], error: BaseException | None) -> None:
    """Leave every guard in reverse, whatever one of them raises; none can swallow the block's error."""
    raised = (None, None, None) if error is None else (type(error), error, error.__traceback__)
    failures: list[tuple[str, BaseException]] = []
    for name, manager in reversed(entered):
        try:
            manager.__exit__(*raised)
        except BaseException as failure:  # noqa: BLE001 - raised below, once the others are restored too
            if failure is not error:
                failures.append((name, failure))
    if len(failures) == 1 and isinstance(failures[0][1], TraceFound):
        raise failures[0][1]
    if failures:
        raise _restore_failed(failures) from failures[0][1]


def _restore_failed(failures: list[tuple[str, BaseException]]) -> RestoreFailed:
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    where = f"rank {torch.distributed.get_rank()}" if ready else "this process"
    names = ", ".join(repr(name) for name, _ in failures)
    told = (": ".join(filter(None, [name, type(failure).__name__, str(failure)])) for name, failure in failures)
    return RestoreFailed(
        f"The warmup ran, but on {where} not all could be put back: guard{'s' * (len(failures) > 1)} {names}.",
        found=f"{'; '.join(told)}.",
        matters=f"The model's state on {where} is unknown; training from here could silently differ.",
        do="Stop this run. Start it again with PP_FREE_WARMUP=0 and report the cause shown above.",
    )


def _name_of(guard: Guard) -> str:
    return str(getattr(guard, "__name__", repr(guard)))
