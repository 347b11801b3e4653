"""Where a forward leaves values for somebody else to read: logs, loss scales, statistics, profilers.

A part of Megatron that the run itself has not loaded is not imported here: its state cannot have been
touched. The exceptions are parts that `schedules.forward_step` imports when it runs, since state that
appears during the pass would stay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from megatron.core import utils
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

MOE = "megatron.core.transformer.moe"
DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
SCALE = "main_loss_backward_scale"


class Slot(NamedTuple):
    """An attribute to lend for the pass.

    Attributes:
        owner: The class or module that keeps it.
        name: Its name.
        lent: What it is during the pass.
    """

    owner: Any
    name: str
    lent: Any


def loaded(module: str) -> ModuleType | None:
    """Return a module of Megatron if this process has imported it; never import it."""
    return sys.modules.get(module)


def named(module: str, name: str) -> Any:
    """Return what a loaded module calls *name*, or None where either is absent."""
    return getattr(loaded(module), name, None)


def loss_trackers() -> Iterator[Slot]:
    """Yield the places where layers gather losses for the log, each with an empty one to lend.

    MoE keeps a dict in `moe_utils` (0.14 to 0.17), then an object in `moe_logging` that is made at its
    first use (0.18 on); MTP keeps a class attribute in all releases, DSA from 0.16 on. How far experts
    were overloaded is gathered in another object of `moe_logging` (the branch `dev`, 2026-08).
    """
    yield from _slots(loaded(f"{MOE}.moe_utils"), "_MOE_LAYER_WISE_LOGGING_TRACKER", {})
    yield from _slots(loaded(f"{MOE}.moe_logging"), "_MOE_METRICS_TRACKER", None)
    yield from _slots(loaded(f"{MOE}.moe_logging"), "_MOE_OVERLOAD_FACTOR_TRACKER", None)
    yield from _slots(MTPLossLoggingHelper, "tracker", {})
    yield from _slots(named(DSA, "DSAIndexerLossLoggingHelper"), "tracker", {})


def loss_scales(configs: Iterable[Any]) -> Iterator[Slot]:
    """Yield the scales that auxiliary losses are multiplied with, each with a copy to lend.

    `set_loss_scale` of MoE (all releases) and DSA (0.16 on) copies into the tensor that is there, or
    keeps the one it is given where there is none; that of MTP re-binds.
    """
    for config in configs:
        _import_scale_of(config)
    scalers = (
        named(f"{MOE}.moe_utils", "MoEAuxLossAutoScaler"),
        MTPLossAutoScaler,
        named(DSA, "DSAIndexerLossAutoScaler"),
    )
    for scaler in scalers:
        yield from _slots(scaler, SCALE, _copy(getattr(scaler, SCALE, None)))


def _import_scale_of(config: Any) -> None:
    """Let `schedules` import the scale that this config asks for, also on a stage without such a layer (0.19)."""
    find = getattr(schedules, "_get_experimental_attention_variant_loss_scale_func", None)
    if find is not None:
        find(config)


def sequence_statistics() -> Iterator[Slot]:
    """Yield the sums of packed sequence lengths for the FLOPs in the log (`megatron.training`, 0.18 on)."""
    training = loaded("megatron.training.training")
    yield from _slots(training, "_seqlen_stats_in_iteration", None)
    yield from _slots(training, "_seqlen_stats_active", False)


def activation_records() -> Iterator[dict[Any, Any]]:
    """Yield the dicts that logging hooks fill, where logging was ever turned on.

    Gradients of activations from 0.16 on, activations and tokens per expert from 0.18 on. The hooks
    hold some of these dicts themselves, so they can be emptied but not exchanged.
    """
    for module in ("activation_logging", "dgrad_logging"):
        logger = named(f"megatron.training.{module}", "_LOGGER")
        yield from (value for value in vars(logger).values() if isinstance(value, dict)) if logger else ()


def straggler_timer() -> Any:
    """Return the detector that ``with stimer:`` in a trainer's forward step times itself with (all releases)."""
    return utils.__straggler__


def nvtx_ranges() -> list[str]:
    """Return Megatron's own stack of open profiler ranges (all releases)."""
    ranges: list[str] = utils._nvtx_range_messages
    return ranges


def close_nvtx_range(message: str) -> None:
    """Close the innermost profiler range."""
    utils.nvtx_range_pop(message)


def student_logits_are_captured() -> bool:
    """Tell whether cached-logits distillation is on, whose loss reads the teacher's file batch by batch (0.19)."""
    capture = named("megatron.training.distillation.cached_logits_loss", "_ACTIVE_STUDENT_LOGITS_CAPTURE")
    saver = named("megatron.training.distillation.logits_saver", "_ACTIVE_LOGITS_SAVER")
    return capture is not None or saver is not None


def _slots(owner: Any, name: str, lent: Any) -> Iterator[Slot]:
    if owner is not None and name in vars(owner):
        yield Slot(owner, name, lent)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
