"""Build a layout's model chunks and optimizer out of Megatron's own parts (0.14 to 0.19)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from pp_free_warmup.testing._layout import Layout, transformer_options


def start_parallel(layout: Layout, seed: int) -> None:
    """Start Megatron's process groups and random number tracker for *layout*."""
    _known(
        parallel_state.initialize_model_parallel,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1 if layout.moe else None,
        create_gloo_process_groups=False,
        get_embedding_ranks=_embedding_ranks(layout),
    )
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    _known(
        tensor_parallel.model_parallel_cuda_manual_seed,
        seed,
        te_rng_tracker=layout.rng_tracker == "te",
        use_cudagraphable_rng=layout.rng_tracker == "graph-safe",
    )


def _embedding_ranks(layout: Layout) -> Callable[..., list[int]] | None:
    """Return which ranks of a pipeline hold the embedding; ``pretrain_gpt.py`` adds a stage with MTP alone."""
    if "pipeline_model_parallel_layout" not in layout.options or not layout.mtp:
        return None
    from megatron.core.transformer.multi_token_prediction import get_mtp_ranks  # 0.16 on

    config = TransformerConfig(**transformer_options(layout))
    return lambda pipeline, *_: sorted({pipeline[0], *get_mtp_ranks(pipeline, config), pipeline[-1]})


def build_chunks(layout: Layout) -> list[Any]:
    """Build this rank's chunks, each wrapped in Megatron's data parallelism."""
    config = TransformerConfig(**transformer_options(layout))
    vars(config).update(layout.unchecked)
    rank, last = parallel_state.get_pipeline_model_parallel_rank(), layout.pp - 1
    virtual = range(layout.vp) if layout.vp else (None,)
    return [
        _wrapped(layout, config, number, _bare(layout, config, stage, first=rank == 0, last=rank == last))
        for number, stage in enumerate(virtual)
    ]


def _bare(layout: Layout, config: Any, vp_stage: int | None, *, first: bool, last: bool) -> Any:
    """Build one GPT chunk; with virtual stages only the first and last chunks have the ends."""
    spec = _layer_spec(layout, config)
    mtp_spec = None
    if layout.mtp:
        use_te = layout.transformer_impl == "te"
        mtp_spec = _known(gpt_layer_specs.get_gpt_mtp_block_spec, config, spec, use_te, vp_stage=vp_stage)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=layout.vocab,
        max_sequence_length=layout.seq,
        pre_process=first and vp_stage in (None, 0),
        post_process=last and (vp_stage is None or vp_stage == (layout.vp or 1) - 1),
        share_embeddings_and_output_weights=layout.tied,
        mtp_block_spec=mtp_spec,
        vp_stage=vp_stage,
    )
    chunk.model_type = getattr(chunk, "model_type", None)
    if parallel_state.get_pipeline_model_parallel_rank() in layout.frozen_stages:
        chunk.requires_grad_(False)
    return chunk.cuda()


def _layer_spec(layout: Layout, config: Any) -> Any:
    if layout.transformer_impl == "te":
        build = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
        return build(num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm)
    return gpt_layer_specs.get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)


def _wrapped(layout: Layout, config: Any, number: int, chunk: Any) -> Any:
    """Wrap a chunk as ``megatron.training.get_model`` does."""
    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
        use_distributed_optimizer=layout.distributed_optimizer,
        # Small enough for several buckets, so that overlap has something to overlap.
        bucket_size=20_000 if layout.overlap_grad_reduce else None,
        delay_wgrad_compute=config.delay_wgrad_compute,
    )
    if layout.bf16 or layout.fp16:
        chunk = Float16Module(config, chunk)
    wrapped = DistributedDataParallel(config, data_parallel, chunk, disable_bucketing=number > 0)
    wrapped.broadcast_params()
    return wrapped


def build_optimizer(layout: Layout, chunks: list[Any]) -> Any:
    """Build Megatron's Adam with clipping, and hand the chunks' config its hooks, as ``train()`` does."""
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        min_lr=1e-4,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=layout.bf16,
        fp16=layout.fp16,
        # Overflows in the first steps and grows again a few steps later.
        initial_loss_scale=2.0**18,
        loss_scale_window=4,
        params_dtype=layout.dtype,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_param_gather=layout.overlap_param_gather,
    )
    optimizer = _known(get_megatron_optimizer, options, chunks, use_gloo_process_groups=False)
    config = chunks[0].config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if layout.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
        config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in chunks])
    return optimizer


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def _known(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call *function* with those keywords that this release of Megatron has."""
    names = inspect.signature(function).parameters
    return function(*arguments, **{name: value for name, value in keywords.items() if name in names})
