"""What this library is tested with, for users to test their own models, guards and layouts with.

Names are imported from their modules when they are first asked for: the models
need megatron-core, the rest does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pp_free_warmup.testing import models, parity
    from pp_free_warmup.testing._cuda_on_cpu import cuda_on_cpu, pretrain_on_cpu
    from pp_free_warmup.testing._rank_pool import RanksFailed, run_on_ranks
    from pp_free_warmup.testing._ranks import ranks
    from pp_free_warmup.testing._trace import assert_leaves_no_trace

__all__ = [
    "RanksFailed",
    "assert_leaves_no_trace",
    "cuda_on_cpu",
    "models",
    "parity",
    "pretrain_on_cpu",
    "ranks",
    "run_on_ranks",
]

_MODULES = frozenset({"models", "parity"})
_HOMES = {
    "RanksFailed": "_rank_pool",
    "assert_leaves_no_trace": "_trace",
    "cuda_on_cpu": "_cuda_on_cpu",
    "pretrain_on_cpu": "_cuda_on_cpu",
    "ranks": "_ranks",
    "run_on_ranks": "_rank_pool",
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
