"""What one training run of the demo is: a frozen record that travels to its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pp_free_warmup.testing.models import Layout

LAYERS = 4
MICROBATCHES = 4


@dataclass(frozen=True)
class Plan:
    """One way to train the small GPT, apart from whether it is warmed.

    Attributes:
        pp: Pipeline stages, one process each.
        vpp: Model chunks per stage, or None for one without virtual stages.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL, a GPU per stage, or shared ones).
        simulate_jit: Seconds that the first forward and the first backward of each model chunk
            sleep, instead of compiling; None compiles for real.
        caches: Whether each rank compiles into a cache of its own, or all into one.
        steps: Training steps.
    """

    pp: int = 2
    vpp: int | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    simulate_jit: float | None = None
    caches: Literal["per-rank", "shared"] = "per-rank"
    steps: int = 20

    @property
    def chunks(self) -> int:
        """Model chunks of the whole pipeline."""
        return self.pp * (self.vpp or 1)

    def layout(self) -> Layout:
        """Return the model: as small as the stages allow, so that compiling is nearly all of the first step."""
        from pp_free_warmup.testing.models import Layout

        return Layout(
            pp=self.pp,
            vp=self.vpp,
            distributed_optimizer=True,
            device=self.device,
            layers=_next_multiple(LAYERS, self.chunks),
            num_microbatches=_next_multiple(MICROBATCHES, self.pp),
        )

    def title(self) -> str:
        """Say in one line what is trained, and name the cache mode: without it no ratio means anything."""
        virtual = f" x {self.vpp} chunks" if self.vpp else ""
        if self.simulate_jit is not None:
            cost = f"first use of a chunk simulated, {self.simulate_jit:g} s per forward and per backward"
        else:
            caches = "one compile cache per rank" if self.caches == "per-rank" else "one compile cache for all ranks"
            cost = f"real compilation, {caches}"
        return f"{self.pp} stages{virtual} on {self.device}; {cost}"


def _next_multiple(least: int, of: int) -> int:
    """Return the smallest multiple of *of* that is at least *least*."""
    return -(-least // of) * of
