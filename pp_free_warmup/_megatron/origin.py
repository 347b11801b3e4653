"""Which Megatron this process runs on, and whose code a schedule is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron.core import __version__
from megatron.core.pipeline_parallel import schedules

from pp_free_warmup._megatron.versions import is_tested


def untested_release() -> str:
    """Return the version that is imported if no release of its series was tested, or an empty string.

    What follows a plus is left out: from 0.19 on, Megatron adds the commit of whatever git tree lies around it.
    """
    return "" if is_tested(__version__) else str(__version__).partition("+")[0]


def foreign_code(schedule: Callable[..., Any]) -> str:
    """Say where a schedule is defined that is not Megatron's own, or return an empty string.

    What was put around Megatron's own with `functools.wraps`, or with wrapt, is looked through. An object that
    only keeps a schedule has no code of its own to tell it by.
    """
    function = inspect.unwrap(schedule)
    code = getattr(function, "__code__", None)
    if code is None or (function.__module__, code.co_filename) == (schedules.__name__, schedules.__file__):
        return ""
    return f"{function.__module__}.{function.__qualname__}, {code.co_filename}:{code.co_firstlineno}"
