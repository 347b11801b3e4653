"""What follows from the bench's runs, one record per case and kind of caches; every number is a median over runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from pp_free_warmup._cli._results import COLD_FACTOR, STEADY_FACTOR

Run = dict[str, Any]
Rank = dict[str, Any]
SCHEDULE = ("schedule", "finalize")
REAL = ("0/log-probs schedule", "0/train schedule", "0/train finalize")
MIB = 1 << 20


def summarize(runs: Sequence[Run], shared: bool) -> list[dict[str, Any]]:
    """Return one record per case and kind of caches of which a run with and one without have ended well."""
    good = [run for run in runs if "ranks" in run and "probe" not in run]
    kinds = dict.fromkeys((run["case"], run["caches"]) for run in good)
    found = []
    for name, caches in kinds:
        mine = [run for run in good if run["case"] == name]
        cold = [run for run in mine if run["caches"] == caches and not run["warmed"]]
        warm = [run for run in mine if run["caches"] == caches and run["warmed"]]
        if cold and warm:
            where = "shared" if shared else "per rank"
            found.append({"name": name, "caches": f"{caches}, {where}", **_case(cold, warm), "identical": equal(mine)})
    return found


def _case(cold: list[Run], warm: list[Run]) -> dict[str, Any]:
    """Return the numbers of one case; see docs/how-to/run-gpu-tests.md for what each means."""
    both = cold + warm
    numbers: dict[str, Any] = {
        "cold_s": _median(first_s, cold),
        "slowest_stage_cold_s": _median(slowest_stage_cold_s, cold),
        "warm_s": _median(first_s, warm),
        "warmup_s": _median(warmup_s, warm),
        "channels_s": _median(channels_s, warm),
        "residual": _median(residual, warm),
        "residual_log_probs": _median(lambda run: residual(run, "log-probs"), warm),
        "steady_step_s": _median(steady_step_s, both),
        "steady_log_probs_s": _median(lambda run: _steady(run, "log-probs", SCHEDULE), both),
        "optimizer_first_s": _median(optimizer_first_s, warm),
        "optimizer_first_cold_s": _median(optimizer_first_s, cold),
        **_extra_memory(cold, warm),
        "kernels_after": max(map(kernels_after, warm)),
        "communicators_after": max(map(communicators_after, warm)),
        "runs": {"without": len(cold), "with": len(warm)},
    }
    numbers["ratio"] = round(numbers["cold_s"] / numbers["warm_s"], 3)
    return {**numbers, "law": _law(numbers)}


def _law(numbers: dict[str, Any]) -> dict[str, Any]:
    """Hold the warmed first step against its slowest stage; all on the right side but it was measured without."""
    steady = numbers["steady_step_s"] + numbers["steady_log_probs_s"]
    bound = COLD_FACTOR * numbers["slowest_stage_cold_s"] + STEADY_FACTOR * steady + numbers["optimizer_first_cold_s"]
    return {"holds": bool(numbers["warm_s"] <= bound), "bound_s": round(bound, 4)}


def _median(of: Callable[[Run], float], runs: Iterable[Run]) -> float:
    return round(median(map(of, runs)), 4)


def first_s(run: Run) -> float:
    """Return the seconds of the first log-probs and the first training step, the warmup and the optimizer included."""
    return float(max(rank["ended"] for rank in run["ranks"]) - min(rank["began"] for rank in run["ranks"]))


def slowest_stage_cold_s(run: Run) -> float:
    """Return the slowest stage's seconds inside its own first forwards and backwards, waiting left out."""
    return float(max(sum(rank["own_s"].values()) for rank in run["ranks"]))


def warmup_s(run: Run) -> float:
    """Return the slowest rank's seconds in both warmups."""
    return float(max(sum(report["total_s"] for report in rank["warmups"]) for rank in run["ranks"]))


def channels_s(run: Run) -> float:
    """Return the slowest rank's part of it that opened channels."""
    return float(
        max(sum(report["seconds"].get("channels", 0.0) for report in rank["warmups"]) for rank in run["ranks"])
    )


def residual(run: Run, kind: str = "train") -> float:
    """Return the seconds of the first real call of the schedule, over those of a steady one."""
    return _slowest(run, 0, kind, SCHEDULE) / _steady(run, kind, SCHEDULE)


def steady_step_s(run: Run) -> float:
    """Return a steady training step: the schedule, and the optimizer after all ranks have met."""
    return _steady(run, "train", SCHEDULE) + median(_slowest(run, n, "optimizer", ("",)) for n in _cycles(run))


def optimizer_first_s(run: Run) -> float:
    """Return the optimizer's first step, after all ranks have met."""
    return _slowest(run, 0, "optimizer", ("",))


def _cycles(run: Run) -> range:
    return range(1, 1 + max(int(name.split("/")[0]) for rank in run["ranks"] for name in rank["phases"] if name))


def _steady(run: Run, kind: str, parts: Sequence[str]) -> float:
    return median(_slowest(run, number, kind, parts) for number in _cycles(run))


def _slowest(run: Run, cycle: int, kind: str, parts: Sequence[str]) -> float:
    names = [f"{cycle}/{kind} {part}".rstrip() for part in parts]
    return float(max(sum(rank["phases"].get(name, {}).get("seconds", 0.0) for name in names) for rank in run["ranks"]))


def kernels_after(run: Run) -> int:
    """Return how many graphs and kernels the real first calls still compiled after their warmup, on all ranks."""
    return sum(_compiled(rank["phases"].get(name, {})) for rank in run["ranks"] for name in REAL)


def _compiled(phase: dict[str, Any]) -> int:
    missed = [count for name, count in phase.get("counters", {}).items() if name.endswith(("_miss", "_bypass"))]
    return len(phase.get("graphs", ())) + int(sum(missed)) + int(phase.get("triton_compiled", 0))


def communicators_after(run: Run) -> int:
    """Return how many communicators the real first calls still created, reducing gradients left out."""
    return max(
        sum(len(rank["phases"].get(name, {}).get("communicators", ())) for name in REAL[:2]) for rank in run["ranks"]
    )


def _extra_memory(cold: list[Run], warm: list[Run]) -> dict[str, int]:
    """Return what a rank took more with the warmup than without, up to the optimizer, and what was promised."""
    promised = (sum(v for k, v in rank["memory"].items() if k != "peak_bytes") for rank in warm[0]["ranks"])
    return {
        "extra_peak_bytes": _more(cold, warm, lambda rank: int(rank["memory"]["peak_bytes"])),
        "extra_peak_promised_bytes": max(promised),
        "extra_out_of_pool_bytes": _more(cold, warm, _out_of_pool),
    }


def _more(cold: list[Run], warm: list[Run], of: Callable[[Rank], int]) -> int:
    def usual(runs: list[Run], rank: int) -> float:
        return median(of(run["ranks"][rank]) for run in runs)

    return int(max(usual(warm, rank) - usual(cold, rank) for rank in range(len(warm[0]["ranks"]))))


def _out_of_pool(rank: Rank) -> int:
    first = (phase for name, phase in rank["phases"].items() if name.startswith("0/"))
    return sum(int(phase.get("out_of_pool_bytes", 0)) for phase in first)


def equal(runs: list[Run]) -> bool | str:
    """Tell whether all runs made the same bits; where those without a warmup disagree, nothing can be told."""
    without = [[rank["made"] for rank in run["ranks"]] for run in runs if not run["warmed"]]
    with_ = [[rank["made"] for rank in run["ranks"]] for run in runs if run["warmed"]]
    if any(made != without[0] for made in without):
        return "not comparable: runs without the warmup differ"
    return all(made == without[0] for made in with_)


def table(cases: Sequence[dict[str, Any]]) -> str:
    """Lay the records out as the README's table."""
    head = "| case | compile caches | without | with | ratio | slowest stage | law | residual | steady | extra peak |"
    lines = [head, "| --- " * (head.count("|") - 1) + "|"]
    for case in cases:
        law, residual_ = case["law"], case["residual"]
        numbers = f"{case['cold_s']:.2f} s | {case['warm_s']:.2f} s | {case['ratio']:.2f}x"
        bound = f"{'holds' if law['holds'] else 'missed'} ({law['bound_s']:.2f} s)"
        rest = f"{case['steady_step_s']:.3f} s | {case['extra_peak_bytes'] / MIB:.0f} MiB"
        stage = f"{case['slowest_stage_cold_s']:.2f} s | {bound} | {residual_:.2f}"
        lines.append(f"| {case['name']} | {case['caches']} | {numbers} | {stage} | {rest} |")
    return "\n".join(lines)
