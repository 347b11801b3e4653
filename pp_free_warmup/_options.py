"""What a user may choose about a warmup, checked when it is chosen."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pp_free_warmup.errors import UnsupportedSetup

ENVIRONMENT_SWITCH = "PP_FREE_WARMUP"
NOT_YET: dict[str, Any] = {"verify": False, "shapes": (), "single_flight": None}


@dataclass(frozen=True, slots=True)
class Options:
    """The keyword arguments of `pipeline_warmup` and `warm_first_call`, as given."""

    enabled: bool | Callable[[], bool] = True
    channels: str | None = "pipeline"
    extra_guards: tuple[Any, ...] = ()
    timeout: float | None = None
    on_unsupported: str = "skip"
    verify: bool = False
    shapes: tuple[Any, ...] = ()
    single_flight: Any = None
    report_to: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Refuse what no call could use.

        Raises:
            UnsupportedSetup: Names the option, what was given and what it takes.
        """
        self._expect("enabled", self.enabled, isinstance(self.enabled, bool) or callable(self.enabled), "a bool or a callable")
        self._expect("channels", self.channels, self.channels in ("pipeline", "all", None), '"pipeline", "all" or None')
        known = self.on_unsupported in ("skip", "raise")
        self._expect("on_unsupported", self.on_unsupported, known, '"skip" or "raise"')
        positive = self.timeout is None or (isinstance(self.timeout, (int, float)) and self.timeout > 0)
        self._expect("timeout", self.timeout, positive, "seconds above 0, or None for the pipeline group's own")
        self._expect("extra_guards", self.extra_guards, all(map(callable, self.extra_guards)), "guards: callables")
        for name, only in NOT_YET.items():
            value = getattr(self, name)
            self._expect(name, value, value == only, f"{only!r}: nothing else is built yet")

    @staticmethod
    def _expect(name: str, value: object, holds: bool, expected: str) -> None:
        if not holds:
            raise UnsupportedSetup(
                f"{name}={value!r} is not something a warmup can do.",
                found=f"{value!r}; expected {expected}.",
                matters="A choice that is silently ignored would look as if it had worked.",
                do=f"Pass a value that {name} takes, or leave it out.",
            )

    def is_on(self) -> bool:
        """Tell whether a warmup is wanted now; asks the environment and, if it is one, the callable."""
        if os.environ.get(ENVIRONMENT_SWITCH, "") == "0":
            return False
        return bool(self.enabled() if callable(self.enabled) else self.enabled)
