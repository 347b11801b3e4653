"""The demo's result as a person reads it."""

from __future__ import annotations

from importlib.metadata import version

from rich.console import Console
from rich.table import Table

from pp_free_warmup._cli._cores import cores_usable
from pp_free_warmup._cli._results import COLD_FACTOR, STEADY_FACTOR, Result
from pp_free_warmup._cli._which_megatron import imported_version

DIFFERENCES_SHOWN = 10


def show(result: Result, console: Console) -> None:
    """Print the table, the law and whether anything differs."""
    plan = result.plan
    software = f"megatron-core {imported_version()}, torch {version('torch')}"
    for line in ("", plan.title(), f"{software}; {cores_usable()} cores{_repeated(result)}"):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_table(result))
    for line in (_law(result), *_equality(result)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _repeated(result: Result) -> str:
    times = len(result.pairs)
    return f"; medians of {times}" if times > 1 else ""


def _table(result: Result) -> Table:
    table = Table("", "without", "with", "ratio")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("first step", _s(result.cold_s), _s(result.warm_s), f"{result.ratio:.2f}x")
    table.add_row("  of it the warmup", "", _s(result.warmup_s))
    table.add_row("  of it the channels", "", f"{result.channels_s:.3f} s")
    table.add_row("  the slowest stage's own part", _s(result.slowest_s), "")
    table.add_row("steady step", f"{result.steady_s:.3f} s", f"{result.steady_s:.3f} s")
    return table


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s"


def _law(result: Result) -> str:
    """Say whether the first step took no more than its slowest stage."""
    sign = "<=" if result.warm_s <= result.bound_s else ">"
    parts = f"{COLD_FACTOR} x {result.slowest_s:.2f} s + {STEADY_FACTOR} x {result.steady_s:.3f} s"
    text = f"law: first step with {result.warm_s:.2f} s {sign} {result.bound_s:.2f} s = {parts} (slowest stage, steady)"
    return text if result.law_applies else f"{text} ({result.plan.pp} stages compile on {cores_usable()} cores)"


def _equality(result: Result) -> list[str]:
    """Say whether everything is equal to the bit, and what is not."""
    what = "losses, gradient norms, gradients, activations and parameters"
    if not result.differences:
        return [f"{what} of all {result.plan.steps} steps: equal to the bit ({result.compared} compared)"]
    count = len(result.differences)
    shown = result.differences[:DIFFERENCES_SHOWN]
    more = [f"  and {count - len(shown)} more"] if count > len(shown) else []
    return [f"{what}: {count} of {result.compared} DIFFER", *(f"  {name}" for name in shown), *more]
