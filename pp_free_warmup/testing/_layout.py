"""Which tiny model to train, and how it is spread: one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Layout:
    """A tiny GPT and the way it is spread over ranks. The data-parallel size follows from the world's.

    Attributes:
        pp: Pipeline stages.
        vp: Model chunks per stage, or None without virtual stages.
        tp: Tensor-parallel ranks.
        ep: Expert-parallel ranks.
        moe: Mixture of experts in every layer, with an auxiliary loss and an expert bias.
        dispatcher: How tokens reach their experts.
        distributed_optimizer: Shard the optimizer over data-parallel ranks.
        overlap_grad_reduce: Reduce gradients during the backward.
        overlap_param_gather: Gather parameters during the forward (with a distributed optimizer).
        recompute: Recompute all of a layer, or the attention core, in the backward.
        tied: Share the weights of the embedding and the output layer.
        dropout: Probability of hidden and attention dropout.
        bf16: Train in bfloat16 with float32 gradients.
        fp16: Train in float16 with float32 gradients and a dynamic loss scale.
        mtp: Multi-token-prediction layers.
        variable_seq_lengths: Microbatches differ in length; stages tell each other the shape.
        deallocate: Drop a stage's output tensor once it was sent.
        frozen_stages: Pipeline ranks none of whose parameters train (needs ``tied=False``).
        device: ``"cpu"`` (inside `cuda_on_cpu`) or ``"cuda"``. All that depends on it asks here.
        transformer_impl: Megatron's own modules, or Transformer Engine's.
        fp8: Transformer Engine's FP8 format.
        rng_tracker: Megatron's tracker of random states: its own, its own in the form that CUDA graphs
            need, or Transformer Engine's.
        layers: Decoder layers of the whole model.
        hidden: Hidden size.
        heads: Attention heads.
        seq: Tokens per sample.
        vocab: Vocabulary.
        micro_batch: Samples per microbatch.
        num_microbatches: Microbatches per step.
        steps: How many steps' data there is.
        options: More fields of Megatron's ``TransformerConfig``; they win.
        unchecked: Fields that are set once the config has checked itself, such as combined steps with
            ``ep=1``, which run but are of no use.
    """

    pp: int = 2
    vp: int | None = None
    tp: int = 1
    ep: int = 1
    moe: bool = False
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    recompute: Literal["full", "selective"] | None = None
    tied: bool = True
    dropout: float = 0.1
    bf16: bool = False
    fp16: bool = False
    mtp: int = 0
    variable_seq_lengths: bool = False
    deallocate: bool = False
    frozen_stages: tuple[int, ...] = ()
    device: Literal["cpu", "cuda"] = "cpu"
    transformer_impl: Literal["local", "te"] = "local"
    fp8: str | None = None
    rng_tracker: Literal["default", "graph-safe", "te"] = "default"
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    seq: int = 32
    vocab: int = 128
    micro_batch: int = 2
    num_microbatches: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)
    unchecked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters and activations."""
        half = torch.float16 if self.fp16 else torch.float32
        return torch.bfloat16 if self.bf16 else half

    def length(self, microbatch: int) -> int:
        """Return the number of tokens per sample of the *microbatch*-th microbatch of a step."""
        return self.seq - 8 * (microbatch % 3) if self.variable_seq_lengths else self.seq


def transformer_options(layout: Layout) -> dict[str, Any]:
    """Return the keyword arguments of Megatron's ``TransformerConfig`` for *layout*."""
    options: dict[str, Any] = {
        "num_layers": layout.layers,
        "hidden_size": layout.hidden,
        "num_attention_heads": layout.heads,
        "ffn_hidden_size": 2 * layout.hidden,
        "hidden_dropout": layout.dropout,
        "attention_dropout": layout.dropout,
        "add_bias_linear": layout.transformer_impl == "local" and not layout.moe,
        "pipeline_dtype": layout.dtype,
        "params_dtype": layout.dtype,
        "bf16": layout.bf16,
        "fp16": layout.fp16,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vp,
        "expert_model_parallel_size": layout.ep,
        "variable_seq_lengths": layout.variable_seq_lengths,
        # Not only for experts: with its own default, 0.19 refuses variable lengths of dense models.
        "moe_token_dispatcher_type": layout.dispatcher,
        "deallocate_pipeline_outputs": layout.deallocate,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_activation_fusion": layout.transformer_impl == "local" and not layout.moe,
        "bias_dropout_fusion": True,
    }
    if layout.vp is not None:
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return {**options, **_feature_options(layout), **layout.options}


def _feature_options(layout: Layout) -> dict[str, Any]:
    """Return the options of what *layout* has switched on."""
    options: dict[str, Any] = {}
    if layout.moe:
        options |= {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 1e-2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        }
    if layout.recompute == "full":
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if layout.recompute == "selective":
        options |= {"recompute_granularity": "selective"}
    if layout.mtp:
        options |= {"mtp_num_layers": layout.mtp, "mtp_loss_scaling_factor": 0.1}
    if layout.fp8 is not None:
        options |= {"fp8": layout.fp8}
    return options
