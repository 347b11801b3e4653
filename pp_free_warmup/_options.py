"""What a user may choose about a warmup, checked when it is chosen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pp_free_warmup.errors import UnsupportedSetup

ENVIRONMENT_SWITCH = "PP_FREE_WARMUP"
VERIFY_SWITCH = "PP_FREE_WARMUP_VERIFY"
UNTESTED_SWITCH = "PP_FREE_WARMUP_UNTESTED"
STRICT = "strict"
NOT_YET: dict[str, Any] = {"shapes": (), "single_flight": None}


@dataclass(frozen=True, slots=True)
class Options:
    """The keyword arguments of `pipeline_warmup` and `warm_first_call`, as given."""

    enabled: bool | Callable[[], bool] = True
    channels: str | None = "pipeline"
    extra_guards: Iterable[Any] = ()
    timeout: float | None = None
    on_unsupported: str = "skip"
    on_failure: str = "continue"
    activations: Callable[[Any, int], Any] | None = None
    verify: bool = False
    shapes: Iterable[Any] = ()
    single_flight: Any = None
    report_to: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Refuse what no call could use, and read each iterable once.

        Raises:
            UnsupportedSetup: Names the option, what was given and what it takes.
        """
        switch = isinstance(self.enabled, bool) or callable(self.enabled)
        self._expect("enabled", self.enabled, switch, "a bool or a callable")
        self._expect("channels", self.channels, self.channels in ("pipeline", "all", None), '"pipeline", "all" or None')
        known = self.on_unsupported in ("skip", "raise")
        self._expect("on_unsupported", self.on_unsupported, known, '"skip" or "raise"')
        known = self.on_failure in ("continue", "raise")
        self._expect("on_failure", self.on_failure, known, '"continue" or "raise"')
        given: Any = self.timeout
        number = isinstance(given, (int, float)) and not isinstance(given, bool)
        positive = given is None or (number and given > 0)
        self._expect("timeout", given, positive, "seconds above 0, or None for the pipeline group's own")
        made = self.activations is None or callable(self.activations)
        self._expect("activations", self.activations, made, "a callable, or None")
        self._expect("verify", self.verify, isinstance(self.verify, bool), "a bool")
        untested = os.environ.get(UNTESTED_SWITCH) or "allow"
        known = untested in ("allow", "refuse") or self.is_off_for_good
        self._expect(UNTESTED_SWITCH, untested, known, '"allow" or "refuse"')
        self._expect("report_to", self.report_to, _is_path(self.report_to), "a path, or None to write no file")
        for name in ("extra_guards", "shapes"):
            value = getattr(self, name)
            self._expect(name, value, isinstance(value, Iterable), "a list")
            object.__setattr__(self, name, tuple(value))
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

    @property
    def strictness(self) -> dict[str, float]:
        """What tells the other ranks, with a vote, that this one wants a failure raised: one is enough for all."""
        return {STRICT: 1.0} if self.on_failure == "raise" else {}

    @property
    def is_off_for_good(self) -> bool:
        """True where no call can switch it on: a block like that may well see no schedule."""
        return self.enabled is False or os.environ.get(ENVIRONMENT_SWITCH, "") == "0"

    def is_on(self) -> bool:
        """Tell whether a warmup is wanted now; asks the environment and, if it is one, the callable."""
        if os.environ.get(ENVIRONMENT_SWITCH, "") == "0":
            return False
        return bool(self.enabled() if callable(self.enabled) else self.enabled)

    def is_verified(self) -> bool:
        """Tell whether the whole state is to be compared before and after the pass."""
        return self.verify or os.environ.get(VERIFY_SWITCH, "") == "1"


def _is_path(value: object) -> bool:
    return value is None or isinstance(value, (str, os.PathLike))
