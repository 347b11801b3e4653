"""What is measured: the same GPT with Megatron's own layers, with Transformer Engine's, and with FP8."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from pp_free_warmup.testing.models import Layout

LAYERS_PER_STAGE = 4
MICROBATCHES = 4
DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"}
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"hidden": 1024, "heads": 16, "seq": 1024, "vocab": 32768, "micro_batch": 2},
    "cpu": {},
}


@dataclass(frozen=True)
class Case:
    """One model, under the name that the results use."""

    name: str
    layout: Layout

    @property
    def needs_te(self) -> bool:
        """True if it cannot be built without Transformer Engine."""
        return self.layout.transformer_impl == "te"


def cases(device: str, *, pp: int, vp: int | None = None, tp: int = 1, ep: int = 1) -> list[Case]:
    """List the cases for one way to spread the model.

    Every stage has the same number of layers however many stages there are, so that first steps with
    more stages can be compared to those with fewer.

    Args:
        device: ``"cuda"``, or ``"cpu"`` for a tiny model, to try the command.
        pp: Pipeline stages.
        vp: Model chunks per stage.
        tp: Tensor-parallel ranks.
        ep: Expert-parallel ranks; more than one makes it a mixture of experts.
    """
    spread = "".join(f"-{name}{n}" for name, n in (("tp", tp), ("ep", ep)) if n > 1)
    spread = f"-pp{pp}{f'-vp{vp}' if vp else ''}{spread}"
    chunks = vp or 1
    local = Layout(
        pp=pp,
        vp=vp,
        tp=tp,
        ep=ep,
        moe=ep > 1,
        layers=pp * chunks * -(-LAYERS_PER_STAGE // chunks) if device == "cuda" else pp * chunks,
        num_microbatches=-(-MICROBATCHES // pp) * pp,
        distributed_optimizer=True,
        bf16=True,
        dropout=0.0,
        device="cuda" if device == "cuda" else "cpu",
        **SIZES[device],
    )
    grouped: dict[str, Any] = {"moe_grouped_gemm": True} if ep > 1 else {}
    te = dataclasses.replace(local, transformer_impl="te", options=grouped)
    fp8 = dataclasses.replace(te, options={**grouped, **DELAYED})
    named = {"local-bf16": local, "te-bf16": te, "te-fp8-delayed": fp8}
    return [Case(name + (spread if spread != "-pp2" else ""), layout) for name, layout in named.items()]
