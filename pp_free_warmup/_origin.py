"""What a warmup says, once, before it runs on code that it was not tested with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import _patch
from pp_free_warmup._options import UNTESTED_SWITCH
from pp_free_warmup._report import say

UNTESTED = (
    "pp_free_warmup: megatron-core {version} is not a tested release; its functions fit: warmed at your own risk; "
    "{switch}=allow ends this line, {switch}=refuse runs without a warmup"
)
FOREIGN = (
    "pp_free_warmup: the schedule {name} is not Megatron's own but {code}; it is warmed as Megatron's would be, "
    "which is right only if it runs the same chunks with Megatron's own steps; PP_FREE_WARMUP=0 runs without a warmup"
)
_said: set[str] = set()


def say_once(schedule: Callable[..., Any] | None) -> None:
    """Log what is not known about this Megatron and this schedule; each line once per process."""
    for line in _lines(schedule):
        if line not in _said:
            _said.add(line)
            say(line)


def _lines(schedule: Callable[..., Any] | None) -> Iterator[str]:
    version = megatron.untested_release()
    if version and not os.environ.get(UNTESTED_SWITCH):
        yield UNTESTED.format(version=version, switch=UNTESTED_SWITCH)
    name = getattr(schedule, "__name__", "")
    if schedule is None or not (name in megatron.SCHEDULE_NAMES or _patch.original_of(schedule)):
        return
    code = megatron.foreign_code(schedule)
    if code:
        yield FOREIGN.format(name=name, code=code)
