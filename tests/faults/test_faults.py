"""Inject faults at every point and rank: nothing hangs, nothing leaks, every survivor's error names who and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import injection
import pytest
from fault_trials import TRIALS, Trial
from forked import Ending, run_forked
from verdicts import COUNTS

pytestmark = [pytest.mark.faults, pytest.mark.ranks]
BOUND = max(injection.SILENCE, injection.GROUP) + 5.0
# Connecting to a store whose process has just died: torch tries twice, for the store's timeout each, with a pause.
BOUND_WITHOUT_STORE = 3 * injection.GROUP


@pytest.fixture(scope="module")
def twins(tmp_path_factory) -> Iterator[str]:
    """The states of never-warmed runs, one file per layout and rank."""
    folder = str(tmp_path_factory.mktemp("twins"))
    for layout, (ranks, _) in injection.LAYOUTS.items():
        endings = run_forked(injection.twin, ranks, layout, folder)
        assert all(ending.kind == "returned" for ending in endings), endings[0].text
    return folder


@pytest.mark.parametrize("mode", ["continue", "raise"])
@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_a_fault_ends_well(trial: Trial, mode: str, twins: str) -> None:
    """All survivors end in time: as if never warmed, or as they were, with an error that names the fault."""
    ranks, _ = injection.LAYOUTS[trial.layout]
    endings = run_forked(
        injection.on_rank, ranks, trial, mode, twins, store=trial.store, group_timeout=injection.GROUP, deadline=60.0
    )

    survivors = {rank: end for rank, end in enumerate(endings) if not (trial.fault == "kill" and rank in trial.ranks)}
    verdict = {
        "hangs": [f"rank {rank}: {end.kind} {_seconds(end)}" for rank, end in survivors.items() if _hangs(end)],
        "leaks": [f"rank {rank}: {leak}" for rank, end in survivors.items() for leak in _leaks(end)],
        "unnamed": [f"rank {rank}: {_said(end)}" for rank, end in survivors.items() if not _names(trial, mode, end)],
    }
    COUNTS.add(verdict)
    assert verdict == {"hangs": [], "leaks": [], "unnamed": []}


def _result(ending: Ending) -> Any:
    assert ending.kind == "returned", f"{ending.kind}: {ending.text}\n{ending.printed}"
    return ending.value


def _seconds(ending: Ending) -> float:
    return ending.value.seconds if ending.kind == "returned" else ending.seconds


def _hangs(ending: Ending) -> bool:
    connecting = ending.kind == "returned" and "while trying to connect to" in ending.value.text
    return ending.kind == "hung" or _seconds(ending) > (BOUND_WITHOUT_STORE if connecting else BOUND)


def _leaks(ending: Ending) -> list[str]:
    return [] if ending.kind == "hung" else _result(ending).leaks


def _said(ending: Ending) -> str:
    return ending.text if ending.kind == "hung" else f"{_result(ending).error} {_result(ending).text}"


def _names(trial: Trial, mode: str, ending: Ending) -> bool:
    """Tell whether an ending says what it should: the outcome, or the error, a rank at fault, and the cause."""
    if ending.kind == "hung":
        return True  # counted as a hang
    result = _result(ending)
    if trial.fault in OUTCOMES:
        return (result.error, result.outcome) == ("", OUTCOMES[trial.fault](trial))
    if result.error == "Injected":  # the rank's own error, at a point where nothing of ours is around it
        return trial.fault == "raise"
    goes_on = mode == "continue" and _can_go_on(trial)
    said = result.reason if goes_on else result.text
    named = any(f"rank {rank}" in said for rank in trial.ranks)
    cause = any(cause in said for cause in CAUSES[trial.fault])
    if goes_on:
        ended = injection.in_own_words(trial, mode) or not result.error
        return result.outcome == "failed" and named and cause and ended
    return result.error in ERRORS and named and cause


def _can_go_on(trial: Trial) -> bool:
    """Tell whether every rank has put its state back and no transfer broke off: the run goes on without a warmup."""
    if trial.point.startswith("channel"):
        return trial.fault == "raise" and _all(trial)  # on some ranks only, others have sent in vain
    alone_in_its_stage = trial.layout == "tp2" and trial.point in ("forward", "backward")
    points = ("save", "vote 1", "forward", "backward", "")
    return trial.fault in ("raise", "oom", "exhaust") and trial.point in points and not alone_in_its_stage


def _all(trial: Trial) -> bool:
    return len(trial.ranks) == injection.LAYOUTS[trial.layout][0]


OUTCOMES = {
    "stall": lambda _trial: "warmed",
    "refuse": lambda _trial: "skipped",
    "off": lambda _trial: "skipped",
    "warm": lambda trial: "primed" if _all(trial) else "warmed",
}
CAUSES = {
    "raise": ("injected error",),
    "oom": ("out of memory",),
    "exhaust": ("StopIteration", "no batch"),
    "kill": ("lost",),
}
ERRORS = ("WarmupFailed", "RankSilent", "RestoreFailed")
