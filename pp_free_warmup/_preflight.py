"""Every reason not to warm a call, from facts that need no communication.

`nothing_to_do` gives reasons that are equal on all ranks by their nature (they
need no vote, and the kind stays open). `nobody_to_ask` gives refusals that leave no
group to vote in, and are equal on all ranks too. `refusal` gives reasons that one
stage alone may see, which are therefore put to the vote.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._batches import is_readable
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._options import UNTESTED_SWITCH


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call cannot be warmed.

    Attributes:
        name: A short stable id, as in the reference of refused setups.
        text: The reason, one clause, with what was found.
        do: What would make it possible.
    """

    name: str
    text: str
    do: str

    @property
    def told(self) -> str:
        """All three, as the log, the report and the error say them."""
        return f"{self.text} [{self.name}]; {self.do}"


def nothing_to_do(schedule: Callable[..., Any], keywords: Mapping[str, Any]) -> str:
    """Return why this call needs no warmup, or an empty string."""
    if getattr(schedule, "__name__", "") == megatron.NO_PIPELINING:
        return "the schedule has no pipeline"  # one rank may call it alone, whatever groups there are
    group = megatron.pipeline_group_of(keywords)
    if hasattr(group, "size") and group.size() == 1:
        return "the pipeline has one stage"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return ""


def nobody_to_ask(call: ScheduleCall) -> Refusal | None:
    """Return why this call's ranks cannot even vote, or None."""
    return next((found for found in (check(call) for check in CHECKS_BEFORE_VOTE) if found is not None), None)


def refusal(call: ScheduleCall) -> Refusal | None:
    """Return the first reason why this call cannot be warmed, or None."""
    return next((found for found in (check(call) for check in CHECKS) if found is not None), None)


def _multi_module(call: ScheduleCall) -> Refusal | None:
    kinds = [type(call.groups.communicator).__name__, type(call.keywords.get("pg_collection")).__name__]
    found = [kind for kind in kinds if kind.startswith("MultiModule")]
    if not found and hasattr(call.groups.pipeline, "size"):
        return None
    text = f"the pipeline spans several modules ({', '.join(found) or 'a list of pipeline groups'})"
    return Refusal("multi-module", text, "nothing helps yet")


def _untested(_call: ScheduleCall) -> Refusal | None:
    version = megatron.untested_release()
    if not version or os.environ.get(UNTESTED_SWITCH) != "refuse":
        return None
    text = f"megatron-core {version} is not a tested release, and {UNTESTED_SWITCH}=refuse"
    return Refusal("untested-megatron", text, f"set {UNTESTED_SWITCH}=allow")


def _chunks(call: ScheduleCall) -> Refusal | None:
    if call.chunks:
        return None
    return Refusal("no-chunks", "this rank has no model chunk", "give every rank of the pipeline a chunk")


def _stage_ranks(call: ScheduleCall) -> Refusal | None:
    if call.groups.stage:
        return None
    return Refusal(
        "no-stage-groups",
        "pg_collection names neither tp_dp_cp nor tp and dp_cp, so this stage's ranks are unknown",
        "set tp_dp_cp (or tp and dp_cp) in the pg_collection",
    )


def _no_store(call: ScheduleCall) -> Refusal | None:
    del call
    if not torch.distributed.is_initialized() or megatron.store_of_world() is not None:
        return None
    backend = torch.distributed.get_backend()
    return Refusal(
        "no-store",
        f"the process groups (backend {backend}) have no key-value store to vote through",
        "initialise torch.distributed with nccl or gloo",
    )


def _encoder_decoder(call: ScheduleCall) -> Refusal | None:
    if not any(megatron.is_encoder_decoder(chunk) for chunk in call.chunks):
        return None
    return Refusal("encoder-decoder", "the model is an encoder and decoder", "nothing helps yet")


def _fully_sharded(call: ScheduleCall) -> Refusal | None:
    found = sorted({type(m).__name__ for m in call.modules() if megatron.is_fully_sharded(m)})
    if not found:
        return None
    return Refusal(
        "megatron-fsdp",
        f"the model is wrapped in {', '.join(found)}, whose gradient reduction runs even inside no_sync()",
        "wrap it in DistributedDataParallel",
    )


def _config_features(call: ScheduleCall) -> Refusal | None:
    for field, (name, text, do) in REFUSED_FIELDS.items():
        value = getattr(call.config, field, None)
        if value is True or (value and value != 1):  # True == 1, and a size of 1 is none
            return Refusal(name, f"config.{field}={value!r}: {text}", do)
    return None


def _trapping_dispatcher(call: ScheduleCall) -> Refusal | None:
    config = call.config
    flexible = getattr(config, "moe_token_dispatcher_type", None) == "flex"
    if not flexible or getattr(config, "moe_flex_dispatcher_backend", None) != "ncclep":  # 0.19
        return None
    return Refusal(
        "ncclep",
        "its buffers trap on the device when made-up activations send a rank more tokens than they hold",
        "use another moe_flex_dispatcher_backend for a warmup",
    )


def _another_placement(call: ScheduleCall) -> Refusal | None:
    found = megatron.out_of_place(call.chunks, call.groups)
    return Refusal("another-placement", found, "nothing helps yet") if found else None


def _lazy_parameters(call: ScheduleCall) -> Refusal | None:
    if not any(torch.nn.parameter.is_lazy(parameter) for parameter in call.parameters()):
        return None
    return Refusal(
        "lazy-parameters",
        "some parameters are uninitialised: they have no shape before the first forward",
        "run a forward before the warmup",
    )


def _meta_parameters(call: ScheduleCall) -> Refusal | None:
    if not any(parameter.is_meta for parameter in call.parameters()):
        return None
    return Refusal("meta-parameters", "some parameters are on the meta device", "load or initialise the weights first")


def _cached_distillation(_call: ScheduleCall) -> Refusal | None:
    if not megatron.student_logits_are_captured():
        return None
    return Refusal(
        "cached-distillation",
        "cached logits are read from or written to files batch by batch, out of this library's reach",
        "nothing helps yet",
    )


def _pipeline_dtype(call: ScheduleCall) -> Refusal | None:
    if call.config.pipeline_dtype is not None:
        return None
    return Refusal("no-pipeline-dtype", "config.pipeline_dtype is None", "set it to the dtype of the activations")


def _iterators(call: ScheduleCall) -> Refusal | None:
    found = [type(iterator).__name__ for iterator in call.iterators if not is_readable(iterator)]
    if not found:
        return None
    return Refusal(
        "unreadable-iterator",
        f"data_iterator is a {found[0]}, with neither __next__ nor get_next and offset",
        "pass an iterator: iter(loader)",
    )


Check = Callable[[ScheduleCall], Refusal | None]
CHECKS_BEFORE_VOTE: tuple[Check, ...] = (_multi_module, _stage_ranks, _no_store)
CHECKS: tuple[Check, ...] = (
    _untested,
    _chunks,
    _encoder_decoder,
    _fully_sharded,
    _config_features,
    _trapping_dispatcher,
    _another_placement,
    _lazy_parameters,
    _meta_parameters,
    _cached_distillation,
    _pipeline_dtype,
    _iterators,
)

WEIGHT_REMAT = ("weight-remat", "one pass alone closes its chain of prefetches into a ring", "leave it at 1")
# config field -> (id, why, what to do); a field that is absent in a release is simply not set
REFUSED_FIELDS = {
    "cpu_offloading": (
        "te-cpu-offload",
        "Transformer Engine's offload context learns its plan from the first pass",
        "turn it off for a warmup",
    ),
    "gtp_weight_remat_size": WEIGHT_REMAT,
    "expert_gtp_weight_remat_size": WEIGHT_REMAT,
    "use_ring_exchange_p2p": (
        "ring-exchange",
        "channels go through an operation that torch does not ship",
        "nothing helps",
    ),
}
