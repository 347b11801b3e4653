"""verl's own ``TrainingWorker`` on CPU ranks: rollouts made up, log-probs, then a PPO step, as its trainer asks.

Ray and the rollout engine are left out: each rank builds the worker that Ray would have built in its process.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from eager import eager_attention, local_layers
from trials import Life, Trace, started_by_torchrun
from verl_rollouts import SAMPLES, VOCAB, batch_of, for_training, made_up, shared

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}
DENSE = {**SMALL, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
EXPERTS = {
    **SMALL,
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 8,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
ON_CPU = {"masked_softmax_fusion": False, "persist_layer_norm": False, "gradient_accumulation_fusion": False}
WITH_EXPERTS = {"moe_grouped_gemm": False}  # needs grouped_gemm, which needs CUDA


@dataclass(frozen=True)
class Setup:
    """How to live.

    Attributes:
        packed: verl's ``use_remove_padding``.
        engine: More of its Megatron engine's settings.
        transformer: More of Megatron's own.
        replay: Replay the log-prob call's routes in training (R2).
        reference: Ask a reference model in the same process too.
        critic: Let a critic live, in place of an actor.
        rollouts: How many.
    """

    packed: bool = True
    engine: dict[str, Any] = field(default_factory=dict)
    transformer: dict[str, Any] = field(default_factory=dict)
    replay: bool = False
    reference: bool = False
    critic: bool = False
    rollouts: int = 3


def load() -> None:
    """Import verl, before the ranks are forked."""
    import mbridge  # noqa: F401
    import verl.workers.engine.megatron.transformer_impl
    import verl.workers.engine_workers  # noqa: F401


def live(warmed: bool, setup: Setup) -> Life:
    """Live through some rollouts on this rank."""
    with tempfile.TemporaryDirectory() as folder, on_cpu(), started_by_torchrun():
        build = partial(_worker, setup, folder, warmed)
        worker = build("value_model" if setup.critic else "language_model")
        reference = build("language_model", forward_only=True) if setup.reference else None
        trace = Trace()
        for number in range(setup.rollouts):
            _rollout(number, setup, worker, reference, trace)
        return Life(trace.lines, _warmups(warmed))


def _warmups(warmed: bool) -> list[tuple[str, str]]:
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    reports = MegatronEngine.forward_backward_batch.warmup.reports if warmed else []
    return [(report.kind, report.outcome) for report in reports]


def _worker(setup: Setup, folder: str, warmed: bool, kind: str, forward_only: bool = False) -> Any:
    """Build a worker as verl's trainer configures it."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import McoreOptimizerConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type=kind,
            model_config=_model(setup, folder, warmed),
            engine_config=_engine(setup, forward_only),
            optimizer_config=McoreOptimizerConfig(lr=1e-2, total_training_steps=10, lr_decay_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.flops_counter = None  # asks for the GPU's name, to say how much of its peak is used
    worker.reset()
    worker.set_loss_fn(_loss(kind))
    return worker


def _model(setup: Setup, folder: str, warmed: bool) -> Any:
    """Describe the model; its ``external_lib`` is how the warmup is switched on."""
    from verl.workers.config import HFModelConfig

    Path(folder, "config.json").write_text(json.dumps(EXPERTS if setup.replay else DENSE))
    model = HFModelConfig(
        path=folder,
        load_tokenizer=False,
        use_remove_padding=setup.packed,
        override_config={"attn_implementation": "eager"},
        external_lib="warm_verl" if warmed else None,
    )
    model.tokenizer = SimpleNamespace(pad_token_id=0)
    return model


def _engine(setup: Setup, forward_only: bool) -> Any:
    from verl.workers.config import McoreEngineConfig
    from verl.workers.config.engine import EngineRouterReplayConfig

    settings = {
        "forward_only": forward_only,
        "infer_max_token_len_per_gpu": 48,
        "infer_micro_batch_size_per_gpu": 2,
        "max_token_len_per_gpu": 48,
        "micro_batch_size_per_gpu": 2,
        "override_transformer_config": {**ON_CPU, **(WITH_EXPERTS if setup.replay else {}), **setup.transformer},
        "pipeline_model_parallel_size": 2,
        "router_replay": EngineRouterReplayConfig("R2" if setup.replay else "disabled"),
        "sequence_parallel": False,
        "use_dynamic_bsz": False,
        "vanilla_mbridge": True,  # mbridge; the other one is Megatron-Bridge
    }
    return McoreEngineConfig(**{**settings, **setup.engine})


def _loss(kind: str) -> Any:
    from verl.workers.config import ActorConfig, CriticConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    shared = {"strategy": "megatron", "ppo_micro_batch_size_per_gpu": 2, "ppo_mini_batch_size": SAMPLES}
    if kind == "value_model":
        return partial(value_loss, CriticConfig(**shared))
    return partial(ppo_loss, ActorConfig(**shared, rollout_n=1, entropy_coeff=0.01))


def _rollout(number: int, setup: Setup, worker: Any, reference: Any, trace: Trace) -> None:
    """Do for one rollout what ``RayPPOTrainer.fit`` asks its workers for."""
    told = worker.engine.is_mp_src_rank_with_outputs()
    data = made_up(number)
    if reference is not None:
        asked = reference.infer_batch(batch_of(data, calculate_entropy=False, compute_loss=False))
        if told:
            trace.add(f"rollout {number} reference log-probs", asked["log_probs"])
    asked = worker.infer_batch(batch_of(data, calculate_entropy=True, compute_loss=False, **_replaying(setup)))
    given = {}
    for name in ("log_probs", "entropy", "values", "routed_experts"):
        if told and name in asked:
            trace.add(f"rollout {number} {name}", asked[name])
            given[name] = asked[name]
    data.update(shared(for_training(data, given) if told else {}))
    trained = worker.train_mini_batch(
        batch_of(
            data,
            calculate_entropy=True,
            compute_loss=True,
            dataloader_kwargs={"shuffle": False},
            epochs=1,
            global_batch_size=SAMPLES // 2,
            mini_batch_size=SAMPLES // 2,
            **_replaying(setup),
        )
    )
    if told:
        for name, value in sorted(trained["metrics"].items()):
            if not name.startswith("perf/"):
                trace.add(f"rollout {number} {name}", value)
    with worker.engine.eval_mode():  # brings back what is offloaded
        trace.add_parameters(f"rollout {number} chunk", worker.engine.module)


def _replaying(setup: Setup) -> dict[str, bool]:
    return {"enable_routing_replay": True} if setup.replay else {}


@contextmanager
def on_cpu() -> Iterator[None]:
    """Replace what verl, and mbridge have for GPUs only."""
    import torch
    from mbridge.core import bridge, llm_bridge
    from megatron.core import tensor_parallel
    from verl.utils import megatron_utils
    from verl.workers.engine.megatron import transformer_impl

    with ExitStack() as stack:

        def lend(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        # Layers of Transformer Engine run on GPUs only.
        lend(llm_bridge, "get_gpt_decoder_block_spec", local_layers(llm_bridge.get_gpt_decoder_block_spec))
        stack.enter_context(eager_attention())
        # There is no checkpoint: the random weights stay.
        lend(bridge.Bridge, "load_weights", lambda *_: None)
        # verl seeds Megatron's tracker only where it sees an accelerator.
        seeded = transformer_impl.set_random_seed
        lend(
            transformer_impl,
            "set_random_seed",
            lambda seed: (seeded(seed), tensor_parallel.model_parallel_cuda_manual_seed(seed)),
        )
        for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
            lend(torch.cuda, name, lambda *_: 0)
        lend(torch.cuda, "mem_get_info", lambda *_: (0, 1))
        # Page-locked memory is CUDA's.
        empty = torch.empty
        lend(megatron_utils.torch, "empty", lambda *sizes, pin_memory=False, **more: empty(*sizes, **more))
        yield
