"""What a training loop keeps beside the model: timers, the rerun state machine (0.14 to 0.19)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from megatron.core import rerun_state_machine
from megatron.core.timers import Timers

RERUN_MACHINE = "_GLOBAL_RERUN_STATE_MACHINE"


def timers_in_use(configs: Iterable[Any]) -> Iterator[Timers]:
    """Yield Megatron's timers, each object once: those of the configs, and the training loop's global ones."""
    loop = sys.modules.get("megatron.training.global_vars")
    found = [getattr(config, "timers", None) for config in configs]
    found.append(getattr(loop, "_GLOBAL_TIMERS", None))
    yield from {id(timers): timers for timers in found if isinstance(timers, Timers)}.values()


def timer_records(timers: Timers) -> Iterator[dict[str, Any]]:
    """Yield the dicts that hold everything a set of timers knows: which there are, and each one's fields."""
    yield timers._timers
    yield timers._log_levels
    for timer in timers._timers.values():
        yield vars(timer)


def rerun_module() -> ModuleType:
    """Return the module that keeps the process's rerun state machine in its global `RERUN_MACHINE`."""
    module: ModuleType = rerun_state_machine
    return module


def rerun_validator() -> Any:
    """Return whose ``validate_result`` a loss calls: the machine, or the class of the one it would create."""
    machine = vars(rerun_state_machine)[RERUN_MACHINE]
    return rerun_state_machine.RerunStateMachine if machine is None else machine
