"""Drive Megatron-LM's own ``pretrain()``, from its wheel and unchanged, and write down all it computes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model

from pp_free_warmup import add_warmup_args, in_warmup, pipeline_warmup, warm_first_call
from pp_free_warmup.testing import pretrain_on_cpu

VALUES = {
    "distributed-backend": "gloo",
    "transformer-impl": "local",
    "tokenizer-type": "NullTokenizer",
    "vocab-size": 127,
    "num-layers": 4,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "micro-batch-size": 2,
    "global-batch-size": 8,
    "lr": 1e-3,
    "min-lr": 1e-4,
    "lr-decay-style": "constant",
    "lr-decay-iters": 100,
    "log-interval": 1,
    "num-workers": 0,
}
FUSIONS = ("gradient-accumulation-fusion", "masked-softmax-fusion", "bias-gelu-fusion", "bias-dropout-fusion")
COMMON = [
    *(f"--{name}={value}" for name, value in VALUES.items()),
    *(f"--no-{name}" for name in (*FUSIONS, "persist-layer-norm", "rope-fusion")),
    "--mock-data",
    "--use-cpu-initialization",
]
PRINTED = re.compile(r"(lm loss value|lm loss|grad norm): ([-+.0-9E]+|nan)")


@dataclass(frozen=True)
class Job:
    """One run of ``pretrain()``.

    Attributes:
        arguments: Megatron's command line, beside `COMMON`.
        switch: How the warmup is switched on: ``"off"`` (this library is not there at all), ``"block"``,
            ``"flag"``, ``"no flag"`` (a block that asks for the flag, and a command line without) or ``"middle"``.
        iterations: How many to train, those before a resume included.
        not_a_number: Let the loss be NaN inside the warmup, and there alone.
        verified: Compare all state before and after the warmup.
    """

    arguments: tuple[str, ...]
    switch: str = "off"
    iterations: int = 5
    not_a_number: bool = False
    verified: bool = True

    def switched(self, switch: str) -> Job:
        """Return the same run with the warmup switched on in another way."""
        return replace(self, switch=switch)


@dataclass
class Trace:
    """What one rank saw of a run; equal traces are equal runs, to the bit.

    Attributes:
        inputs: Per microbatch: what was read, and all parameters at that moment, as a digest.
        losses: Per microbatch on the last stage: the loss, written exactly.
        printed: The numbers that Megatron printed, on the last rank.
        final: All parameters after the last iteration, as a digest.
    """

    inputs: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    printed: list[tuple[str, str]] = field(default_factory=list)
    final: str = ""


@dataclass
class Observed:
    """A run's trace, and what the warmup did in it.

    Attributes:
        trace: What must not depend on the warmup.
        passes: How many forward steps ran inside the warmup.
        first: After how many real microbatches the first of them ran.
        reports: Kind and outcome of each warmup, in order.
    """

    trace: Trace
    passes: int = 0
    first: int = -1
    reports: list[tuple[str, str]] = field(default_factory=list)


class Watch:
    """The forward step and loss of ``pretrain_gpt.py`` in short, which write down what they see."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.seen = Observed(Trace())
        self.chunks: dict[int, Any] = {}
        self.counted = threading.local()  # neither a warmup nor its verification looks into a thread's own
        self.counted.passes, self.counted.first = 0, -1

    def forward_step(self, iterator: Any, model: Any) -> Any:
        """Run one microbatch as ``pretrain_gpt.py`` does."""
        from megatron.training import get_timers
        from megatron.training.utils import is_first_or_last_pipeline_stage

        timers = get_timers()
        timers("batch-generator", log_level=2).start()
        reads = is_first_or_last_pipeline_stage(get_attr_wrapped_model(model, "vp_stage"))
        batch = next(iterator) if reads else dict.fromkeys(("tokens", "position_ids", "labels", "loss_mask"))
        timers("batch-generator").stop()
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        self._note(model, batch["tokens"])  # now, since the forward gathers parameters where that is overlapped
        batch["tokens"] = None  # pretrain_gpt.py writes into its batch too
        return output, partial(self.loss, batch["loss_mask"])

    def loss(self, mask: torch.Tensor, output: torch.Tensor) -> Any:
        """Sum the token losses and have the rerun machine look at them, as ``pretrain_gpt.py`` does."""
        loss = torch.sum(output.view(-1).float() * mask.view(-1).float())
        if in_warmup() and self.job.not_a_number:
            loss = loss * float("nan")
        for rejected, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss, rejection_func=rejected, message=f"found {what}", tolerance=0.0, fatal=True
            )
        tokens = mask.sum().clone().detach().to(torch.int)
        if not in_warmup():
            self.seen.trace.losses.append(loss.item().hex())
        return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}

    def _note(self, model: Any, tokens: Any) -> None:
        if in_warmup():
            self.counted.passes += 1
            self.counted.first = len(self.seen.trace.inputs) if self.counted.first < 0 else self.counted.first
        else:
            self.chunks.setdefault(id(model), model)
            self.seen.trace.inputs.append(_digest([tokens, *model.parameters()]))

    def finish(self, printed: str, reports: list[Any]) -> Observed:
        """Add what is known only at the end, and let the model go."""
        self.seen.trace.printed = PRINTED.findall(printed)
        self.seen.trace.final = _digest(p for chunk in self.chunks.values() for p in chunk.parameters())
        self.seen.passes, self.seen.first = self.counted.passes, self.counted.first
        self.seen.reports = [(report.kind, report.outcome) for report in reports]
        self.chunks.clear()
        return self.seen


def _digest(tensors: Any) -> str:
    digest = hashlib.sha1(usedforsecurity=False)
    for tensor in tensors:
        digest.update(b"-" if tensor is None else tensor.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def _datasets(numbers: Any, vp_stage: int | None = None) -> Any:
    """Build mock data where the first and the last chunk read some, as ``pretrain_gpt.py`` does."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args
    from megatron.training.utils import is_first_or_last_pipeline_stage

    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        split="90,5,5",
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    here = partial(is_first_or_last_pipeline_stage, vp_stage)
    return BlendedMegatronDatasetBuilder(MockGPTDataset, numbers, here, config).build()


_datasets.is_distributed = True  # type: ignore[attr-defined]


def run(*jobs: Job) -> list[Observed]:
    """Run jobs one after the other in this rank's process."""
    return [_run(job) for job in jobs]


def _run(job: Job) -> Observed:
    watch, printed = Watch(job), io.StringIO()
    flag = ["--enable-pp-free-warmup"] if job.switch == "flag" else []
    command = ["pretrain", *COMMON, "--train-iters", str(job.iterations), *job.arguments, *flag]
    from megatron.training import training

    rank = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": "0"}
    rank["PP_FREE_WARMUP_VERIFY"] = str(int(job.verified))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", command))
        stack.enter_context(mock.patch.dict(os.environ, rank))
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(pretrain_on_cpu())
        # Filled by a first run in this process, which others may not have had: they would reduce it apart.
        stack.enter_context(mock.patch.dict(training._STARTUP_TIMESTAMPS))
        stack.callback(_forget)
        warmup = stack.enter_context(_switched_on(job, watch))
        _pretrain(watch)
    return watch.finish(printed.getvalue(), warmup.reports)


def _pretrain(watch: Watch) -> None:
    """Do what the main block of ``pretrain_gpt.py`` does."""
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(extra_args_provider=add_warmup_args, args_defaults={})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, _datasets, ModelType.encoder_or_decoder, watch.forward_step)


@contextlib.contextmanager
def _switched_on(job: Job, watch: Watch) -> Iterator[Any]:
    """Switch the warmup on as the job says, and yield what has its reports."""
    from megatron.training import get_args, training

    if job.switch == "middle":
        # train() fetches its schedule once, and looks train_step up at every iteration.
        step = warm_first_call(training.train_step, enabled=lambda: get_args().curr_iteration >= 2)
        with mock.patch.object(training, "train_step", step):
            yield step.warmup
        return
    if job.switch == "off":
        yield SimpleNamespace(reports=[])
        return
    with pipeline_warmup(enabled=job.switch == "block" or (lambda: get_args().enable_pp_free_warmup)) as warmup:
        yield warmup


def _forget() -> None:
    """Take down what one run leaves in Megatron's globals."""
    from megatron.training import training

    dist.barrier()
    training.destroy_global_state()


def run_without_a_guard(name: str, *jobs: Job) -> list[Observed]:
    """Run jobs with one of the library's guards taken away."""
    from pp_free_warmup import guards

    left = tuple(guard for guard in guards.GUARDS if guard.__name__ != name)
    assert len(left) == len(guards.GUARDS) - 1
    with mock.patch.object(guards, "GUARDS", left):
        return run(*(replace(job, verified=False) for job in jobs))
