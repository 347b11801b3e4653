"""ms-swift's own Megatron trainers on CPU ranks, started by its own main functions with made-up data.

The model is a Qwen 2.5 of four narrow layers with random weights and a tokenizer of one token per word.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from eager import eager_attention, local_layers
from hollow import hollow, megatron_without_te
from trials import Life, Trace, started_by_torchrun

WORDS = [f"w{number}" for number in range(40)]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "system", "user", "assistant", "\n"]
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 64,
}
SETTINGS = {
    "add_version": False,
    "attention_backend": "local",
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "apply_rope_fusion": False,
    "check_model": False,
    "dataloader_num_workers": 0,
    "dataset_num_proc": 1,
    "ddp_backend": "gloo",
    "eval_iters": 2,
    "eval_steps": 2,
    "global_batch_size": 4,
    "gradient_accumulation_fusion": False,
    "load_from_cache_file": False,
    "logging_steps": 1,
    "lr": 1e-2,
    "masked_softmax_fusion": False,
    "max_length": 64,
    "megatron_extra_kwargs": {"attention_dropout": 0.1, "hidden_dropout": 0.1, "persist_layer_norm": False},
    "micro_batch_size": 2,
    "model_type": "qwen2",
    "perform_initialization": True,
    "pipeline_model_parallel_size": 2,
    "report_to": [],
    "split_dataset_ratio": 0.2,
    "template": "qwen2_5",
    "train_iters": 5,
    "tuner_type": "full",
}


@dataclass(frozen=True)
class Setup:
    """How to train.

    Attributes:
        settings: More of ms-swift's own arguments, as pairs.
        preferences: Train on preferences, by DPO.
    """

    settings: tuple[tuple[str, Any], ...] = ()
    preferences: bool = False


def load() -> None:
    """Import ms-swift, before the ranks are forked; it insists on Transformer Engine."""
    megatron_without_te()
    name = "megatron.core.extensions.transformer_engine"
    plain = sys.modules.pop(name)  # what Megatron has imported keeps it; mcore-bridge inherits from TE's layers
    with hollow("transformer_engine"):
        import swift.megatron.pipelines.train.rlhf
        import swift.megatron.pipelines.train.sft  # noqa: F401
    sys.modules[name] = plain


def live(warmed: bool, setup: Setup) -> Life:
    """Train for some iterations on this rank."""
    from swift.megatron.pipelines.train.rlhf import megatron_rlhf_main
    from swift.megatron.pipelines.train.sft import megatron_sft_main

    from pp_free_warmup import pipeline_warmup

    main = megatron_rlhf_main if setup.preferences else megatron_sft_main
    trace = Trace()
    with tempfile.TemporaryDirectory() as folder, started_by_torchrun(), on_cpu(trace):
        arguments = _arguments(setup, Path(folder))
        if not warmed:
            main(arguments)
            return Life(trace.lines, [])
        with pipeline_warmup() as warmup:
            main(arguments)
        return Life(trace.lines, [(report.kind, report.outcome) for report in warmup.reports])


def _arguments(setup: Setup, folder: Path) -> Any:
    from swift.megatron.arguments import MegatronRLHFArguments, MegatronSftArguments

    _write_model(folder)
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in _rows(setup.preferences)))
    more = {"rlhf_type": "dpo"} if setup.preferences else {}
    settings = {**SETTINGS, **dict(setup.settings), **more}
    of = MegatronRLHFArguments if setup.preferences else MegatronSftArguments
    return of(model=str(folder), dataset=[str(data)], output_dir=str(folder / "out"), callbacks=["trace"], **settings)


def _write_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="\n"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=SPECIAL[1:3],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="\n",
    )
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))


def _rows(preferences: bool) -> list[dict[str, Any]]:
    draw = random.Random(1)
    says = lambda: " ".join(draw.choices(WORDS, k=draw.randint(3, 12)))  # noqa: E731
    rows = []
    for _ in range(40):
        asked, answered, rejected = says(), says(), says()
        row: dict[str, Any] = {"messages": [_said("user", asked), _said("assistant", answered)]}
        rows.append({**row, "rejected_response": rejected} if preferences else row)
    return rows


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _tracing(trace: Trace) -> type:
    """Return a callback of ms-swift's that writes down what it logs, its state and the parameters."""
    from swift.megatron.callbacks.base import MegatronCallback

    class Tracing(MegatronCallback):
        def on_log(self, logs: Any) -> None:
            for name, value in sorted(logs.items()):
                trace.add(f"iteration {self.state.iteration} {name}", value)

        def on_step_end(self) -> None:
            when = f"iteration {self.state.iteration}"
            for name, value in sorted(vars(self.state).items()):
                trace.add(f"{when} state.{name}", value)
            trace.add_parameters(f"{when} chunk", self.trainer.wrapped_models)

    return Tracing


@contextmanager
def on_cpu(trace: Trace) -> Iterator[None]:
    """Replace what ms-swift and mcore-bridge have for GPUs only."""
    from mcore_bridge.bridge import GPTBridge
    from mcore_bridge.model import register
    from swift.megatron.callbacks import megatron_callbacks_map
    from swift.megatron.trainers.base import BaseMegatronTrainer

    with ExitStack() as stack:

        def lend(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        # Layers of Transformer Engine run on GPUs only.
        lend(register, "get_gpt_decoder_block_spec", local_layers(register.get_gpt_decoder_block_spec))
        stack.enter_context(eager_attention())
        # There is no checkpoint: the random weights stay, and nothing is kept at the end.
        lend(GPTBridge, "load_weights", lambda *_, **__: None)
        lend(BaseMegatronTrainer, "save_checkpoint", lambda _: None)
        stack.enter_context(mock.patch.dict(megatron_callbacks_map, trace=_tracing(trace)))
        yield
