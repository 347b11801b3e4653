"""Every trial of the fault harness, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# The points of a warmup, in order; injection.py says where each one is.
POINTS = ("save", "vote 1", "forward", "backward", "restore", "vote 2", "channel 1", "channel 2", "vote 3")
# Who meets the fault, by name, of four ranks.
WHO = {"first": (0,), "middle": (1,), "last": (3,), "all": (0, 1, 2, 3)}


@dataclass(frozen=True)
class Trial:
    """One fault at one point on some ranks, in one world.

    Attributes:
        fault: ``raise``, ``oom``, ``kill``, ``stall``, ``refuse``, ``off``, ``warm`` or ``exhaust``.
        point: Where in the warmup; empty for a fault that is there from the start.
        ranks: The global ranks that meet it.
        layout: A name in `injection.LAYOUTS`.
        store: Who serves the store, see `run_forked`.
        nth: At which pass through the point, from 0 (virtual stages pass some twice).
        off: Ranks that are switched off, so that the others save and put back without a pass.
    """

    fault: str
    point: str = ""
    ranks: tuple[int, ...] = (0,)
    layout: str = "pp4"
    store: str = "agent"
    nth: int = 0
    off: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = [self.fault, self.point, f"on {','.join(map(str, self.ranks))}", self.layout, self.store]
        more = [f"nth {self.nth}" if self.nth else "", f"off {','.join(map(str, self.off))}" if self.off else ""]
        return " ".join(filter(None, [*parts, *more]))


def _of_a_line() -> Iterable[Trial]:
    """Every point of four stages, on the first, a middle, the last and all ranks."""
    for point in POINTS:
        for who, ranks in WHO.items():
            yield Trial("raise", point, ranks)
            if who != "all":
                yield Trial("kill", point, ranks)
            if who in ("first", "last"):
                yield Trial("stall", point, ranks)
    for point in ("save", "forward", "backward"):
        for ranks in WHO.values():
            yield Trial("oom", point, ranks)


def _of_waits() -> Iterable[Trial]:
    """An interrupt, or death, while waiting inside a vote."""
    for vote in (1, 2, 3):
        for who, ranks in WHO.items():
            yield Trial("raise", f"inside {vote}", ranks)
            # Who has spoken in the last vote and then dies does so in the real step, unless it is the one who decides.
            if who == "first" or (who != "all" and vote < 3):
                yield Trial("kill", f"inside {vote}", ranks)
    for rank in range(4):  # one that leads its stage, and one that does not
        yield Trial("raise", "inside 1", (rank,), layout="tp2")
        yield Trial("raise", "inside 2", (rank,), layout="tp2")


def _of_calls_without_a_pass() -> Iterable[Trial]:
    """A rank that cannot put back what it saved for a pass that another rank declined."""
    for rank in range(4):
        yield Trial("raise", "restore", (rank,), off=((rank + 1) % 4,))


def _of_decisions() -> Iterable[Trial]:
    """Ranks that will not, or need not."""
    for fault in ("refuse", "off", "warm"):
        for ranks in WHO.values():
            yield Trial(fault, ranks=ranks)
    for ranks in ((0,), (3,), (0, 3)):  # only these have data
        yield Trial("exhaust", ranks=ranks)


def _of_stores() -> Iterable[Trial]:
    """The host of the store is killed or fails; a file has no host."""
    for point in POINTS:
        yield Trial("kill", point, (0,), store="rank0")
        yield Trial("raise", point, (0,), store="rank0")
        yield Trial("kill", point, (2,), store="file")


def _of_grids() -> Iterable[Trial]:
    """Ranks that share a stage, in whose collectives their peers may be stuck, and virtual stages."""
    for fault in ("raise", "kill"):
        for rank in range(4):
            for point in ("save", "forward", "backward", "vote 2", "channel 1"):
                yield Trial(fault, point, (rank,), layout="tp2")
            for point in ("forward", "vote 2"):
                yield Trial(fault, point, (rank,), layout="dp2")
        for point in ("forward", "backward"):
            for rank in range(2):
                for nth in range(2):
                    yield Trial(fault, point, (rank,), layout="vp2", nth=nth)


TRIALS = (*_of_a_line(), *_of_waits(), *_of_calls_without_a_pass(), *_of_decisions(), *_of_stores(), *_of_grids())
