"""User code, as a user writes it; type-checked, never run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pp_free_warmup import (
    WarmupReport,
    add_warmup_args,
    errors,
    guards,
    in_warmup,
    pipeline_warmup,
    prime_channels,
    warm_first_call,
    warmup_now,
)
from pp_free_warmup.guards import Guard, ScheduleCall


def around_the_first_step(model: torch.nn.Module, optimizer: Any, schedule: Callable[..., list[Any]]) -> str:
    """Hold the first step in a block, and read the report."""
    with pipeline_warmup(model, optimizer) as warmup:
        schedule(model=model)
    report: WarmupReport = warmup.report
    as_json: dict[str, Any] = report.to_dict()
    return f"{report}{as_json}{report.reason}"


def around_the_loop(models: list[torch.nn.Module], arguments: argparse.Namespace) -> None:
    """Use every option of the block."""
    with pipeline_warmup(
        models,
        enabled=lambda: bool(arguments.enable_pp_free_warmup),
        channels="pipeline",
        extra_guards=[my_guard],
        timeout=600,
        on_unsupported="raise",
        on_failure="raise",
        verify=False,
        shapes=(),
        single_flight=None,
        report_to="report.json",
    ):
        prime_channels(models)


def before_the_checkpoint(model: torch.nn.Module, step: Callable[..., Any]) -> str:
    """Warm without a step."""
    return warmup_now(model, batch={}, forward_step_func=step, num_microbatches=1, channels="all").outcome


@contextmanager
def my_guard(call: ScheduleCall) -> Iterator[None]:
    """Keep something of one's own."""
    assert call.num_microbatches
    yield


@warm_first_call
def train_step(model: torch.nn.Module, batch: torch.Tensor) -> float:
    """Decorate without parentheses: the signature stays."""
    return float(batch.sum()) if in_warmup() else 0.0


@warm_first_call(timeout=600.0, channels=None)
def another_step(model: torch.nn.Module) -> int:
    """Decorate with options: the signature stays."""
    return 1


def results(model: torch.nn.Module, fetched_before: Callable[..., list[Any]]) -> tuple[float, int, list[Any]]:
    """Call what was decorated."""
    schedule = warm_first_call(fetched_before)
    assert str(train_step.warmup.report)
    return train_step(model, torch.zeros(1)), another_step(model), schedule(model=model)


class Trainer:
    """A method may be decorated as well."""

    @warm_first_call
    def step(self, batch: torch.Tensor) -> float:
        """Take a step."""
        return float(batch.sum())

    def run(self, batches: list[torch.Tensor]) -> list[float]:
        """Call the decorated method as any other."""
        return [self.step(batch) for batch in batches]


def parser() -> argparse.ArgumentParser:
    """Add the flag."""
    return add_warmup_args(argparse.ArgumentParser())


def my_handler(error: errors.WarmupError) -> tuple[str, str, str, str]:
    """Read an error's parts."""
    return error.wrong, error.found, error.matters, error.do


ALL_GUARDS: tuple[Guard, ...] = guards.GUARDS
