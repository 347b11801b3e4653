"""Let every pipeline stage of a Megatron model pay its first-step cost at the same time, and leave no trace.

Importing this package imports neither Megatron nor torch: each public name is
imported from its module when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pp_free_warmup import errors, guards, testing
    from pp_free_warmup._arguments import add_warmup_args
    from pp_free_warmup._channels import prime_channels
    from pp_free_warmup._decorator import warm_first_call
    from pp_free_warmup._ledger import in_warmup
    from pp_free_warmup._now import warmup_now
    from pp_free_warmup._report import WarmupReport
    from pp_free_warmup._warmup import pipeline_warmup

__all__ = [
    "WarmupReport",
    "__version__",
    "add_warmup_args",
    "errors",
    "guards",
    "in_warmup",
    "pipeline_warmup",
    "prime_channels",
    "testing",
    "warm_first_call",
    "warmup_now",
]

__version__ = "0.1.0"

_MODULES = frozenset({"errors", "guards", "testing"})
_HOMES = {
    "WarmupReport": "_report",
    "add_warmup_args": "_arguments",
    "in_warmup": "_ledger",
    "pipeline_warmup": "_warmup",
    "prime_channels": "_channels",
    "warm_first_call": "_decorator",
    "warmup_now": "_now",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
