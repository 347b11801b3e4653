"""What one rank of the bench does: log-probs and a training step, first and then steadily, and what each took.

Megatron is imported inside the functions: the process that sends this to the ranks
imports the module only to name it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from pp_free_warmup._cli._bench_cases import Case
from pp_free_warmup._cli._bench_probes import Probe, probe_named
from pp_free_warmup._cli._records import clock
from pp_free_warmup._cli._timeline import Timeline
from pp_free_warmup._monitor import Monitor
from pp_free_warmup._undo import swapped


def measure(case: Case, *, warmed: bool, steady: int, probe: str = "") -> dict[str, Any]:
    """Take a first and some steady steps on this rank; `torch.distributed` must be running.

    Args:
        case: What to build.
        warmed: Whether to warm up.
        steady: How many steps follow the first.
        probe: A probe of `_bench_probes` that looks closer, and costs time.

    Returns:
        ``began`` and ``ended`` of the first log-probs and step; ``phases`` of every cycle, by
        ``cycle/what``; ``own_s``, this stage's own first forwards and backwards (without a warmup only);
        ``warmups``; ``memory``; ``made``, digests of what training made; ``probe``.
    """
    from pp_free_warmup import pipeline_warmup
    from pp_free_warmup.testing.models import build

    training = build(case.layout)
    looks = probe_named(probe, training)
    run = _Run(training, dist.new_group(backend="gloo"), looks)
    block: Any = pipeline_warmup(training.chunks, training.optimizer, on_unsupported="raise")
    with looks.installed(), run.watched(), block if warmed else nullcontext():
        timeline = Timeline(training.chunks, lambda _: None)
        with nullcontext() if warmed or probe else timeline.watching():
            first = run.first()
        for number in range(1, steady + 1):
            run.cycle(number)
    return {
        "rank": dist.get_rank(),
        **first,
        "own_s": {f"{span.use} {n}": span.seconds for n, span in enumerate(timeline.spans) if span.first},
        "warmups": [report.to_dict() for report in block.reports],
        "phases": {name: phase.to_dict() for name, phase in run.monitor.phases.items()},
        "made": run.made(),
        "probe": looks.found(),
    }


class _Run:
    """A training that is measured.

    Args:
        training: The model and its optimizer.
        meeting: A gloo group of all ranks: to wait for each other without opening anything on the device.
        probe: Looks closer.
    """

    def __init__(self, training: Any, meeting: Any, probe: Probe) -> None:
        self.monitor = Monitor()
        self._training = training
        self._meeting = meeting
        self._probe = probe
        self._part = ""
        self._returned: list[Any] = []
        self._norms: list[float] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count, and tell the real schedule and the reduction of gradients from what surrounds them.

        Whoever looks the schedules up while the block lasts, a warmup too, finds them marked.
        """
        from megatron.core.pipeline_parallel import schedules

        from pp_free_warmup._megatron import SCHEDULE_NAMES

        config = self._training.config
        with ExitStack() as kept:
            for name in SCHEDULE_NAMES:
                kept.enter_context(swapped(schedules, name, self._marked(getattr(schedules, name), "schedule")))
            finalize = self._marked(config.finalize_model_grads_func, "finalize")
            kept.enter_context(swapped(config, "finalize_model_grads_func", finalize))
            kept.enter_context(self.monitor.watching())
            yield

    def first(self) -> dict[str, Any]:
        """Take the first log-probs and step; return when, and what memory they took."""
        self._meet()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        began = clock()
        peak = self.cycle(0)
        return {"began": began, "ended": clock(), "memory": {"peak_bytes": peak, **self._allowed()}}

    def cycle(self, number: int) -> int:
        """Take log-probs and one training step; return the peak of memory before the optimizer.

        In the first one, ranks meet only where the optimizer's gradient norm makes them meet anyway.
        """
        with self._as(f"{number}/log-probs"), torch.no_grad():
            self._schedule(forward_only=True)
        if number:
            self._meet()
        with self._as(f"{number}/train"):
            self._training.zero_grad()
            self._schedule(forward_only=False)
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        with self._as(f"{number}/meet"):
            self._meet()
        with self._as(f"{number}/optimizer"), self._probe.around(self._part):
            _, norm, _ = self._training.optimizer.step()
        self._norms.append(float(norm))
        if number:
            self._meet()
        return peak

    def made(self) -> dict[str, str]:
        """Return what training made, as text: losses, log-probs and norms of all steps, parameters after the last."""
        from pp_free_warmup.testing import _recording as recording

        fields = dict(recording.model_fields(self._training.chunks))
        for number, losses in enumerate(self._returned):
            fields |= {f"call {number}: {name}": text for name, text in recording.loss_fields(losses).items()}
        return fields | {f"step {number}: gradient norm": norm.hex() for number, norm in enumerate(self._norms)}

    def _schedule(self, *, forward_only: bool) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        schedule = get_forward_backward_func()
        self._returned.append(schedule(**self._training.schedule_arguments(forward_only=forward_only)))

    @contextmanager
    def _as(self, part: str) -> Iterator[None]:
        self._part = part
        with self.monitor.phase(part):
            yield

    def _marked(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(function)  # keeps name and signature, which tell schedules and releases apart
        def marked(*arguments: Any, **keywords: Any) -> Any:
            name = f"{self._part} {what}"
            with self.monitor.phase(name), self._probe.around(name):
                return function(*arguments, **keywords)

        return marked

    def _meet(self) -> None:
        dist.barrier(group=self._meeting)

    def _allowed(self) -> dict[str, int]:
        """Return what a warmup may take besides, by its own promise: a gradient, an activation, a batch."""
        layout = self._training.layout
        mains = [vars(p).get("main_grad") for chunk in self._training.chunks for p in chunk.parameters()]
        sizes = [main.numel() * main.element_size() for main in mains if main is not None]
        tokens = layout.seq * layout.micro_batch
        activation = tokens * layout.hidden * layout.dtype.itemsize
        return {"main_grad_bytes": max(sizes), "activation_bytes": activation, "batch_bytes": tokens * (3 * 8 + 4)}
