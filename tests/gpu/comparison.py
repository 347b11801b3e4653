"""Say how a run with the warmup compares to two without, from what their ranks wrote down."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from pp_free_warmup._trace import BENIGN
from tests.gpu.configurations import Configuration

SHOWN = 12
STATE = "state."
# Static inputs and outputs of captured graphs lie in the pool that all graphs share: whichever graph
# was replayed last has left its numbers there, and each replay overwrites its own before it reads them.
# What a runner notes of its inputs (``..._metas``) points there too: two runs without the warmup differ in it.
GRAPH_POOL = tuple(
    f"*.cudagraph_runners*.{name}*"
    for name in ("fwd_graph_input_kwargs", "fwd_graph_input_kwarg_metas", "fwd_graph_outputs", "static_grad_")
)
Ranks = list[dict[str, Any]]
Place = tuple[int, int, str]


def verdict(configuration: Configuration, first: Ranks, warmed: Ranks, second: Ranks) -> dict[str, Any]:
    """Compare path by path.

    Paths of the walk over the whole state that differ between the two runs without the warmup
    (counters of the process) are left out, and counted. Any other such difference makes the
    configuration not comparable.

    Returns:
        ``verdict``: identical, differs, state differs (only the walk over the whole state does),
        not comparable or not warmed; for a control noticed or blind. ``compared``: how many paths.
        ``left_out`` and ``differences``: the first ones.
    """
    apart, changed = _unequal(first, second), _unequal(first, warmed)
    noise = {place for place in apart if place[2].startswith(STATE)}
    changed = [place for place in changed if place not in noise]
    told = {
        "compared": sum(len(fields) for rank in first for fields in rank["fields"]) - len(noise),
        "left_out": _shown(sorted(noise)),
        "problems": _problems(first + warmed + second),
        "losses": [loss for rank in first for loss in rank["losses"]][:: configuration.layout.num_microbatches],
        "warmups": [rank["warmups"] for rank in warmed],
        "differences": _shown(changed),
    }
    real = [place for place in apart if place not in noise]
    if not _was_warmed(configuration, warmed):
        return {"verdict": "not warmed", **told}
    if real:
        return {"verdict": "not comparable", "apart": _shown(real), **told}
    if configuration.without:
        return {"verdict": "noticed" if changed else "blind", **told}
    numbers = any(not place[2].startswith(STATE) for place in changed)
    return {"verdict": "differs" if numbers else "state differs" if changed else "identical", **told}


def _was_warmed(configuration: Configuration, warmed: Ranks) -> bool:
    """Tell whether every rank warmed every kind of call: otherwise nothing was tested."""
    kinds = {"training", *(["forward-only"] if configuration.forward_only_first else [])}
    return all(
        kinds <= {report["kind"] for report in rank["warmups"] if report["outcome"] == "warmed"} for rank in warmed
    )


def _unequal(one: Ranks, other: Ranks) -> list[Place]:
    """List what differs by rank, step and path, in the order of writing."""
    found = []
    for rank, (left, right) in enumerate(zip(one, other, strict=True)):
        for step, (mine, theirs) in enumerate(zip(left["fields"], right["fields"], strict=True)):
            paths = dict.fromkeys([*mine, *theirs])
            unequal = (path for path in paths if mine.get(path) != theirs.get(path))
            found += [(rank, step, path) for path in unequal if not _is_benign(path)]
    return found


def _is_benign(path: str) -> bool:
    """Tell whether `assert_leaves_no_trace` lets this path change, too, or whether it is scratch of captured graphs."""
    patterns = (*BENIGN, *GRAPH_POOL)
    return path.startswith(STATE) and any(fnmatchcase(path.removeprefix(STATE), pattern) for pattern in patterns)


def _shown(places: list[Place]) -> list[str]:
    """Name the first places in order of time, numbers before the walk over the state, and count the rest."""
    ordered = sorted(places, key=lambda place: (place[2].startswith(STATE), place[1]))
    lines = [f"step {step}, rank {rank}: {path}" for rank, step, path in ordered[:SHOWN]]
    return lines + ([f"and {len(places) - SHOWN} more"] if len(places) > SHOWN else [])


def _problems(ranks: Ranks) -> list[str]:
    """Return what could not be walked, each text once."""
    texts = (
        fields["state walk failed"] for rank in ranks for fields in rank["fields"] if "state walk failed" in fields
    )
    return list(dict.fromkeys(texts))
