"""Megatron-Bridge's own ``pretrain()`` on CPU ranks, with a small GPT and its mock data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

from hollow import hollow, megatron_without_te
from trials import Life, Trace, started_by_torchrun

ITERATIONS = 5
SMALL = {
    "attention_dropout": 0.1,
    "ffn_hidden_size": 64,
    "hidden_dropout": 0.1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_layers": 4,
    "pipeline_model_parallel_size": 2,
    "position_embedding_type": "rope",
    "seq_length": 32,
    "vocab_size": 128,
}
ON_CPU = {
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}


@dataclass(frozen=True)
class Setup:
    """How to train.

    Attributes:
        model: More of the model's settings.
        sharded: Shard the optimizer, and overlap its communication.
        evaluated: Evaluate every second iteration.
    """

    model: dict[str, Any] = field(default_factory=dict)
    sharded: bool = False
    evaluated: bool = False


def load() -> None:
    """Import Megatron-Bridge, before the ranks are forked; it insists on packages that need a GPU."""
    megatron_without_te()
    import modelopt.torch.distill.plugins.megatron  # noqa: F401

    with hollow("transformer_engine", "megatron.energon"):
        import megatron.bridge.training.gpt_step
        import megatron.bridge.training.pretrain  # noqa: F401


def live(warmed: bool, setup: Setup) -> Life:
    """Train for some iterations on this rank."""
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from pp_free_warmup import pipeline_warmup

    seen = Seen()
    with on_cpu(), started_by_torchrun():
        if not warmed:
            pretrain(_config(setup), forward_step, callbacks=seen.callbacks())
            return Life(seen.trace.lines, [])
        with pipeline_warmup() as warmup:
            pretrain(_config(setup), forward_step, callbacks=seen.callbacks())
        return Life(seen.trace.lines, [(report.kind, report.outcome) for report in warmup.reports])


def _config(setup: Setup) -> Any:
    """Configure a small GPT, mock data and Bridge's own defaults for the rest."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.bridge.training import config as of

    optimizer = of.OptimizerConfig(
        optimizer="adam", lr=1e-2, min_lr=1e-3, bf16=True, use_distributed_optimizer=setup.sharded
    )
    overlap = {"overlap_grad_reduce": setup.sharded, "overlap_param_gather": setup.sharded}
    data = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False, "num_workers": 0}
    evaluation = {"eval_interval": 2, "eval_iters": 2} if setup.evaluated else {"eval_interval": None, "eval_iters": 0}
    return of.ConfigContainer(
        model=GPTModelProvider(**SMALL, **ON_CPU, **setup.model, transformer_layer_spec=local_layer_spec),
        train=of.TrainingConfig(train_iters=ITERATIONS, global_batch_size=8, micro_batch_size=2),
        validation=of.ValidationConfig(**evaluation),
        optimizer=optimizer,
        scheduler=of.SchedulerConfig(lr_decay_style="constant", start_weight_decay=0.1, end_weight_decay=0.1),
        ddp=of.DistributedDataParallelConfig(use_distributed_optimizer=setup.sharded, **overlap),
        dataset=of.MockGPTDatasetConfig(
            random_seed=1, seq_length=SMALL["seq_length"], split="8,1,1", dataloader_type="single", **data
        ),
        logger=of.LoggerConfig(log_interval=1),
        tokenizer=of.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=SMALL["vocab_size"] - 1),
        checkpoint=of.CheckpointConfig(),
        rng=of.RNGConfig(seed=1),
        dist=of.DistributedInitConfig(distributed_backend="gloo"),
        mixed_precision="bf16_mixed",
    )


class Seen:
    """What Bridge's own callbacks tell."""

    def __init__(self) -> None:
        self.trace = Trace()

    def callbacks(self) -> Any:
        """Return the manager to pass on."""
        from megatron.bridge.training.callbacks import CallbackManager

        manager = CallbackManager()
        manager.register("on_train_step_end", self._step)
        manager.register("on_eval_end", partial(self._note, "evaluation", fields=("total_loss_dict",)))
        manager.register("on_test_end", partial(self._note, "test", fields=("total_loss_dict",)))
        manager.register("on_train_end", partial(self._note, "end"))
        return manager

    def _step(self, context: Any) -> None:
        step = context.state.train_state.step
        self._note(f"iteration {step}", context, ("loss_dict", "grad_norm", "skipped_iter"))
        self.trace.add_parameters(f"iteration {step} chunk", context.model)

    def _note(self, when: str, context: Any, fields: tuple[str, ...] = ()) -> None:
        """Write down *fields*, the state of training and what is counted beside it (FLOPs among it)."""
        for name in fields:
            self.trace.add(f"{when} {name}", getattr(context, name))
        for name, value in vars(context.state.train_state).items():
            self.trace.add(f"{when} train_state.{name}", value)
        for name, value in sorted(vars(context.state).items()):
            if name != "start_time" and isinstance(value, (bool, int, float)):
                self.trace.add(f"{when} state.{name}", value)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Replace what Bridge has for GPUs only."""
    from megatron.bridge.training import initialize, setup

    with ExitStack() as stack:

        def lend(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        # pretrain() does not pass this on.
        lend(setup, "initialize_megatron", partial(initialize.initialize_megatron, allow_no_cuda=True))
        # Runs make, for a helper that the wheel ships built and without its Makefile.
        lend(initialize, "compile_helpers", lambda: None)
        yield
