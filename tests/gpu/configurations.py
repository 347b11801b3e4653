"""What is compared on GPUs, as data: one record per configuration, sized by the number of GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pp_free_warmup.testing.models import Layout


@dataclass(frozen=True)
class Configuration:
    """One model, how it is spread, and what happens around the warmup.

    Attributes:
        name: Names it in the results and on the command line.
        layout: The model.
        warm_at: The step before which the warmup block opens; the steps before it make state to keep.
        forward_only_first: Call the schedule forward-only before the first warmed step, as RL does.
        gradients_at_entry: Accumulate one call's gradients before the warmed step, and do not zero them.
        without: Names of guards that are taken away: the run must then differ, or the comparison is blind.
        fused_weight_gradients: Let Transformer Engine add to ``main_grad`` in its own kernels.
        activations: Whether layers are hooked; a captured layer does not take that.
    """

    name: str
    layout: Layout
    warm_at: int = 0
    forward_only_first: bool = False
    gradients_at_entry: bool = False
    without: tuple[str, ...] = ()
    fused_weight_gradients: bool = False
    activations: bool = True

    @property
    def needs_te(self) -> bool:
        """True if it cannot be built without Transformer Engine."""
        return self.layout.transformer_impl == "te" or self.layout.rng_tracker == "te"

    @property
    def needs_gpu(self) -> bool:
        """True if it cannot run on a CPU, whatever is installed."""
        return self.needs_te or self.layout.fp16 or self.layout.rng_tracker != "default"


DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"}
GRAPHS = {"cuda_graph_impl": "local", "cuda_graph_modules": []}


def base_layout(world: int, device: str = "cuda") -> Layout:
    """Return a GPT with a stage per GPU; sizes are multiples of 128, as blockwise FP8 needs."""
    sizes = {"hidden": 256, "heads": 4, "seq": 128, "vocab": 512} if device == "cuda" else {}
    return Layout(
        pp=world,
        layers=2 * world,
        num_microbatches=max(4, world),
        bf16=True,
        dropout=0.0,
        device="cuda" if device == "cuda" else "cpu",
        **sizes,
    )


def configurations(world: int, device: str = "cuda") -> list[Configuration]:
    """List every configuration for *world* ranks, the most telling first."""
    base = base_layout(world, device)
    te = dataclasses.replace(base, transformer_impl="te")
    make = _Maker(base, te)
    return [
        *_formats(make),
        *_entries(make),
        *_features(make),
        *_layouts(make, world),
        *_delayed_weight_gradients(make, world),
        *_controls(make),
        *_graphs(make),
    ]


class _Maker:
    """Makes configurations out of two base layouts and what differs."""

    def __init__(self, local: Layout, te: Layout) -> None:
        self.bases = {"local": local, "te": te}

    def __call__(
        self, name: str, spec: str = "te", options: Mapping[str, Any] | None = None, /, **changes: Any
    ) -> Configuration:
        names = {field.name for field in dataclasses.fields(Configuration)}
        around = {key: changes.pop(key) for key in list(changes) if key in names}
        layout = dataclasses.replace(self.bases[spec], options=dict(options or {}), **changes)
        return Configuration(name, layout, **around)


def _formats(make: Callable[..., Configuration]) -> list[Configuration]:
    """Number formats, specs and random number trackers."""
    return [
        make("local-bf16", "local"),
        make("te-bf16"),
        make("te-fp8-delayed", "te", DELAYED),
        make("te-fp8-tensorwise", "te", {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
        make("te-fp8-blockwise", "te", {"fp8": "e4m3", "fp8_recipe": "blockwise"}),
        make("local-dropout", "local", dropout=0.1),
        make("te-dropout", dropout=0.1),
        make("te-dropout-graph-safe-tracker", dropout=0.1, rng_tracker="graph-safe"),
        make("te-dropout-te-tracker", dropout=0.1, rng_tracker="te"),
        make("local-fp16-dynamic-loss-scale", "local", bf16=False, fp16=True),
    ]


def _entries(make: Callable[..., Configuration]) -> list[Configuration]:
    """What is already there when the warmup begins."""
    return [
        make("te-fp8-delayed-history-at-entry", "te", DELAYED, warm_at=5),
        make("te-fp8-delayed-forward-only-first", "te", DELAYED, forward_only_first=True),
        make("te-forward-only-first-dropout", dropout=0.1, forward_only_first=True),
        make("te-gradients-at-entry", gradients_at_entry=True, fused_weight_gradients=True),
        make(
            "te-fp8-delayed-gradients-at-entry",
            "te",
            DELAYED,
            gradients_at_entry=True,
            warm_at=2,
            fused_weight_gradients=True,
        ),
        make("local-gradients-at-entry-dropout", "local", gradients_at_entry=True, warm_at=2, dropout=0.1),
    ]


def _features(make: Callable[..., Configuration]) -> list[Configuration]:
    """What a model or its training loop may use besides."""
    overlap = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    return [
        make("te-moe-grouped-gemm", "te", {"moe_grouped_gemm": True}, moe=True, dropout=0.1),
        make("local-moe", "local", moe=True),
        make("te-mtp", mtp=1),
        make("te-recompute-full", recompute="full", dropout=0.1),
        make("te-fp8-delayed-recompute", "te", DELAYED, recompute="full"),
        make("te-recompute-selective", recompute="selective", dropout=0.1),
        make("te-distributed-optimizer-overlap", dropout=0.1, **overlap),
        make("te-fp8-delayed-distributed-optimizer-overlap", "te", DELAYED, **overlap),
        make("te-deallocated-outputs", deallocate=True),
        make("te-fused-weight-gradients", dropout=0.1, fused_weight_gradients=True),
        make("te-fp8-delayed-fused-weight-gradients", "te", DELAYED, fused_weight_gradients=True),
    ]


def _layouts(make: Callable[..., Configuration], world: int) -> list[Configuration]:
    """Virtual stages at every number of ranks; tensor and expert parallelism from four on."""
    virtual = {"vp": 2, "layers": 4 * world}
    found = [
        make("te-virtual-stages", dropout=0.1, **virtual),
        make("te-fp8-delayed-virtual-stages", "te", DELAYED, **virtual),
        make("local-virtual-stages", "local", **virtual),
    ]
    if world % 4 == 0:
        two = {"pp": 2, "layers": 4, "num_microbatches": 4}
        found += [
            make("te-pp2-tp2", dropout=0.1, tp=2, **two),
            make("te-fp8-delayed-pp2-tp2", "te", DELAYED, tp=2, **two),
            make("te-pp2-ep2", "te", {"moe_grouped_gemm": True}, moe=True, ep=2, **two),
        ]
    if world >= 8:
        four = {"pp": 4, "layers": 8, "num_microbatches": 8}
        found += [
            make("te-pp4", dropout=0.1, **four),
            make("te-pp4-virtual-stages", dropout=0.1, vp=2, **four),
        ]
    return found


def _delayed_weight_gradients(make: Callable[..., Configuration], world: int) -> list[Configuration]:
    """Combined steps, and weight gradients computed after the backward that they belong to.

    Megatron wants combined steps to have expert ranks; with one the same code runs, less its all-to-all.
    """
    experts = {"moe": True, "vp": 2, "layers": 4 * world}
    combined = {"overlap_moe_expert_parallel_comm": True}
    delayed = {**combined, "delay_wgrad_compute": True}
    overlap = {"distributed_optimizer": True, "overlap_grad_reduce": True}
    grouped = {"moe_grouped_gemm": True}
    beside_dispatch = {**grouped, "overlap_dispatch_backward_with_experts_wgrad": True}
    found = [
        make("local-delayed-wgrad", "local", unchecked=delayed, **experts),
        make("te-combined-steps", "te", grouped, unchecked=combined, **experts),
        make("te-delayed-wgrad", "te", grouped, unchecked=delayed, **experts),
        make("te-delayed-wgrad-fused", "te", grouped, unchecked=delayed, fused_weight_gradients=True, **experts),
        make("te-delayed-wgrad-overlap", "te", grouped, unchecked=delayed, **experts, **overlap),
        make("te-fp8-delayed-wgrad", "te", {**DELAYED, **grouped}, unchecked=delayed, **experts),
        make(
            "te-delayed-wgrad-gradients-at-entry",
            "te",
            grouped,
            unchecked=delayed,
            gradients_at_entry=True,
            warm_at=2,
            fused_weight_gradients=True,
            **experts,
        ),
        make("te-experts-wgrad-beside-dispatch", "te", beside_dispatch, moe=True, fused_weight_gradients=True),
    ]
    if world % 4 == 0:
        expert_ranks = {"moe": True, "vp": 2, "pp": 2, "ep": 2, "layers": 8, "num_microbatches": 4}
        found.append(make("te-pp2-ep2-delayed-wgrad", "te", {**grouped, **delayed}, **expert_ranks))
    return found


def _controls(make: Callable[..., Configuration]) -> list[Configuration]:
    """Runs with a guard taken away, which must differ: the proof that the comparison can see."""
    return [
        make("control-te-fp8-delayed-without-fp8-guard", "te", DELAYED, without=("fp8_state",)),
        make("control-local-dropout-without-rng-guard", "local", dropout=0.1, without=("rng",)),
        make("control-te-gradients-without-guard", gradients_at_entry=True, without=("gradients",)),
    ]


def _graphs(make: Callable[..., Configuration]) -> list[Configuration]:
    """Local CUDA graphs; last, since Megatron then moves the process to another stream for good."""
    return [
        make("te-local-cuda-graphs", "te", GRAPHS, rng_tracker="te", activations=False),
        make("te-dropout-local-cuda-graphs", "te", GRAPHS, rng_tracker="te", dropout=0.1, activations=False),
    ]
