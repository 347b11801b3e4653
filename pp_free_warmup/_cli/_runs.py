"""Start one training run in processes of its own, with empty compile caches, and bring its records home."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pp_free_warmup._cli._plan import Plan
from pp_free_warmup._cli._progress import Progress
from pp_free_warmup._cli._results import Run
from pp_free_warmup._cli._worker import train


class RunFailed(Exception):
    """A rank raised, died or hung, or did not warm up; the text says which, and has its traceback or stacks."""


def run_fresh(plan: Plan, *, warmed: bool, timeout: float, progress: Progress) -> Run:
    """Train once, one new process per stage; they end with this function, whatever happens.

    Args:
        plan: What to train.
        warmed: Whether to warm up.
        timeout: Seconds after which the run counts as hung.
        progress: Shows what the ranks do.

    Raises:
        RunFailed: A rank raised, died or hung, or did not warm up although it should have.
    """
    title = f"{'with' if warmed else 'without'} the warmup"
    with tempfile.TemporaryDirectory(prefix="pp-free-warmup-") as folder:
        notes = Path(folder, "notes")
        notes.mkdir()
        with progress.following(notes, plan.pp, title):
            from pp_free_warmup.testing import RanksFailed, run_on_ranks  # imports torch, which takes seconds

            try:
                ranks = run_on_ranks(
                    train,
                    plan.pp,
                    plan,
                    fresh=True,
                    timeout=timeout,
                    device=plan.device,
                    jit=plan.simulate_jit is None,
                    environment=_environment(plan, Path(folder)),
                    warmed=warmed,
                    notes=str(notes),
                )
            except RanksFailed as failure:
                raise RunFailed(f"a rank failed in the run {title}.\n{failure}") from None
    for rank in ranks:
        if warmed and rank.warmup["outcome"] != "warmed":
            raise RunFailed(f"rank {rank.rank} did not warm up: {rank.warmup['outcome']}, {rank.warmup['reason']}.")
    return Run(tuple(ranks))


def _environment(plan: Plan, folder: Path) -> dict[str, str]:
    """Return what the ranks find in their environment, besides a compile cache of each one's own."""
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if plan.caches == "shared":
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    return environment
