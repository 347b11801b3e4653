"""One training run of a configuration on this rank, with or without the warmup."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import guards, pipeline_warmup
from pp_free_warmup._undo import swapped
from pp_free_warmup.testing import models
from tests.gpu.configurations import Configuration
from tests.gpu.recording import Recorder

SEED = 1


def record(configuration: Configuration, *, warm: bool, steps: int) -> dict[str, Any]:
    """Train on this rank and return what there is to compare.

    Args:
        configuration: What to build, and what to do around the warmup.
        warm: Whether the block is opened.
        steps: Training steps.

    Returns:
        ``fields`` (per step, path to text), ``losses``, ``warmups`` (the reports), ``seconds``.
    """
    warnings.simplefilter("default")  # what a GPU's libraries warn about is not under test here
    with _like_a_new_process(), _all_to_all_copies(), contextlib.ExitStack() as block:
        run = _Run(configuration, block, warm=warm, steps=steps)
        return run.through(steps)


class _Run:
    """A training and the block around it."""

    def __init__(self, configuration: Configuration, block: contextlib.ExitStack, *, warm: bool, steps: int) -> None:
        began = time.perf_counter()
        self.configuration, self.warm, self.block = configuration, warm, block
        self.training = models.build(configuration.layout, SEED)
        _fuse_weight_gradients(configuration, self.training)
        self.recorder = Recorder(self.training, steps, activations=configuration.activations)
        self.replays = block.enter_context(_counted_replays())
        self.warmup: Any = None
        self.build_s = time.perf_counter() - began

    def through(self, steps: int) -> dict[str, Any]:
        """Take all steps."""
        began = time.perf_counter()
        for step in range(steps):
            self._step(step)
        return {
            "fields": self.recorder.fields,
            "losses": self.recorder.losses,
            "warmups": [report.to_dict() for report in self.warmup.reports] if self.warmup else [],
            "seconds": {"build": round(self.build_s, 2), "run": round(time.perf_counter() - began, 2)},
        }

    def _step(self, step: int) -> None:
        recorder, configuration = self.recorder, self.configuration
        self.replays.clear()
        here = step == configuration.warm_at
        with recorder.begin():
            if here:
                self._enter()
            if not (here and configuration.gradients_at_entry):
                self.training.zero_grad()
            recorder.returned("step", self._schedule())
        recorder.gradients()
        updated, norm, _ = self.training.optimizer.step()
        recorder.note("updated", bool(updated))
        recorder.note("gradient norm", "none" if norm is None else float(norm).hex())
        recorder.note("loss scale", float(self.training.optimizer.get_loss_scale()))
        recorder.note("graph replays", len(self.replays))
        recorder.state()

    def _enter(self) -> None:
        """Do what comes before the first warmed step, and open the block."""
        configuration = self.configuration
        if configuration.gradients_at_entry:
            self.training.zero_grad()
            self.recorder.returned("gradients at entry", self._schedule())
        if self.warm:
            kept = tuple(guard for guard in guards.GUARDS if guard.__name__ not in configuration.without)
            assert len(kept) == len(guards.GUARDS) - len(configuration.without), "a guard to leave out is unknown"
            self.block.enter_context(swapped(guards, "GUARDS", kept))
            self.warmup = self.block.enter_context(pipeline_warmup(self.training.chunks, self.training.optimizer))
        if configuration.forward_only_first:
            with torch.no_grad():
                self.recorder.returned("log-probs", self._schedule(forward_only=True))

    def _schedule(self, *, forward_only: bool = False) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        schedule = get_forward_backward_func()
        return list(schedule(**self.training.schedule_arguments(forward_only=forward_only)))


def _fuse_weight_gradients(configuration: Configuration, training: models.Training) -> None:
    """Let Transformer Engine add weight gradients to ``main_grad`` itself.

    Megatron's switch for it also wants Apex, for the output layer.
    """
    for chunk in training.chunks:
        for module in chunk.modules():
            if configuration.fused_weight_gradients and hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True


@contextlib.contextmanager
def _counted_replays() -> Iterator[list[int]]:
    """Count the replays of CUDA graphs: one entry each."""
    counted: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def counting(graph: Any) -> None:
        counted.append(1)
        replay(graph)

    with swapped(torch.cuda.CUDAGraph, "replay", counting):
        yield counted


@contextlib.contextmanager
def _all_to_all_copies() -> Iterator[None]:
    """Let an all-to-all of one rank return a copy, as one of several does.

    Megatron hands its input on instead, and combined steps free that input afterwards.
    """
    exchange = mappings._AllToAll
    real = exchange.forward

    def forward(context: Any, group: Any, tokens: torch.Tensor, *sizes: Any) -> torch.Tensor:
        arrived = real(context, group, tokens, *sizes)
        return arrived.clone() if arrived is tokens else arrived

    with swapped(exchange, "forward", staticmethod(forward)):
        yield


@contextlib.contextmanager
def _like_a_new_process() -> Iterator[None]:
    """Forget what an earlier run left in the process, so that each begins alike."""
    torch.compiler.reset()
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    for owner, name, empty in megatron.loss_trackers():
        setattr(owner, name, empty)
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    if quantization is not None:
        quantization.FP8GlobalStateManager.reset()
    try:
        yield
    finally:
        graphs = sys.modules.get("megatron.core.transformer.cuda_graphs")
        if torch.cuda.is_available() and graphs is not None:
            torch.cuda.synchronize()
            graphs.delete_cuda_graphs()
            torch.cuda.set_stream(torch.cuda.default_stream())
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
