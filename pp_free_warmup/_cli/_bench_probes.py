"""What looks closer at a first call than its seconds: synchronized spans, torch's profiler, Python's profiler.

Each compares the first real call with the same call in a steady step, and so names what only the first one
pays for.
"""

from __future__ import annotations

import cProfile
import functools
import pstats
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from statistics import median
from typing import Any

import torch

from pp_free_warmup import in_warmup
from pp_free_warmup._cli._records import clock
from pp_free_warmup._report import synchronize_device
from pp_free_warmup._undo import swapped

SHORTEST_S = 0.010
FIRST, STEADY = "0/", "2/"
PARTS = ("log-probs schedule", "train schedule", "optimizer")
OPTIMIZER_PARTS = (
    "prepare_grads",
    "get_grad_norm",
    "clip_grad_norm",
    "_unscale_main_grads_and_check_for_nan",
    "_copy_model_grads_to_main_grads",
    "_copy_main_params_to_model_params",
    "step_with_ready_grads",
)
Row = dict[str, Any]


class Probe:
    """Looks at nothing; the base of those that do."""

    def __init__(self, training: Any) -> None:
        self.training = training

    def installed(self) -> AbstractContextManager[Any]:
        """Return the context in which everything is measured."""
        return nullcontext()

    def around(self, name: str) -> AbstractContextManager[Any]:
        """Return the context of one part of one cycle, such as ``0/train schedule``."""
        del name
        return nullcontext()

    def found(self) -> dict[str, list[Row]]:
        """Return, for each part, what took at least `SHORTEST_S` longer in the first call than in a steady one."""
        return {}


class Spans(Probe):
    """Times Megatron's own steps, with the device synchronized at both ends."""

    def __init__(self, training: Any) -> None:
        super().__init__(training)
        self._part = ""
        self._seconds: dict[str, list[tuple[str, float]]] = defaultdict(list)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Time every forward, backward, exchange, reduction of gradients and part of the optimizer."""
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        optimizers = getattr(self.training.optimizer, "chained_optimizers", [self.training.optimizer])
        owners: list[tuple[Any, tuple[str, ...]]] = [
            (schedules, ("forward_step", "backward_step")),
            (P2PCommunicator, ("_communicate",)),
            (self.training.config, ("finalize_model_grads_func",)),
            *((optimizer, OPTIMIZER_PARTS) for optimizer in optimizers),
            *((optimizer.optimizer, ("step",)) for optimizer in optimizers),
        ]
        with ExitStack() as kept:
            for owner, names in owners:
                for name in names:
                    if callable(getattr(owner, name, None)):
                        kept.enter_context(swapped(owner, name, self._timed(getattr(owner, name), name)))
            yield

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Book what follows under *name*."""
        outer, self._part = self._part, name
        try:
            yield
        finally:
            self._part = outer

    def found(self) -> dict[str, list[Row]]:
        """Compare span by span, in the order of the calls."""
        return {part: list(self._longer(part)) for part in (*PARTS, "train finalize")}

    def _longer(self, part: str) -> Iterator[Row]:
        steady = [spans for name, spans in self._seconds.items() if name.endswith(f"/{part}") and name[:2] != FIRST]
        for index, (name, seconds) in enumerate(self._seconds[FIRST + part]):
            usual = median(spans[index][1] for spans in steady if index < len(spans)) if steady else 0.0
            if seconds - usual >= SHORTEST_S:
                yield {"name": f"{name} #{index}", "first_s": round(seconds, 4), "steady_s": round(usual, 4)}

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            synchronize_device()
            began = clock()
            try:
                return function(*arguments, **keywords)
            finally:
                synchronize_device()
                if not in_warmup():
                    self._seconds[self._part].append((name, clock() - began))

        return timed


class Tables(Probe):
    """Compares two tables of seconds by name, one of the first call and one of a steady one."""

    def __init__(self, training: Any) -> None:
        super().__init__(training)
        self._tables: dict[str, dict[str, Row]] = {}

    def around(self, name: str) -> AbstractContextManager[Any]:
        """Profile the parts that are compared."""
        cycle, part = name[:2], name[2:]
        return self.profiled(name) if cycle in (FIRST, STEADY) and part in PARTS else nullcontext()

    def profiled(self, name: str) -> AbstractContextManager[Any]:
        """Return the context in which one part is profiled; its table is kept."""
        raise NotImplementedError

    def found(self) -> dict[str, list[Row]]:
        """Compare name by name, the largest difference first."""
        return {part: list(self._longer(part)) for part in PARTS}

    def _longer(self, part: str) -> Iterator[Row]:
        first, steady = self._tables.get(FIRST + part, {}), self._tables.get(STEADY + part, {})
        nothing = {"seconds": 0.0, "calls": 0}
        rows = [(name, row, steady.get(name, nothing)) for name, row in first.items()]
        for name, row, usual in sorted(rows, key=lambda each: each[2]["seconds"] - each[1]["seconds"]):
            if row["seconds"] - usual["seconds"] >= SHORTEST_S:
                numbers = {"first_s": round(row["seconds"], 4), "steady_s": round(usual["seconds"], 4)}
                yield {"name": name, **numbers, "first_calls": row["calls"], "steady_calls": usual["calls"]}


class Operators(Tables):
    """Torch's profiler: operators and calls of the CUDA runtime and driver, by their own CPU seconds."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Start the profiler once before, so that its own start is not measured."""
        with self._profiler():
            torch.zeros(1, device=torch.cuda.current_device()).sum()
        yield

    @contextmanager
    def profiled(self, name: str) -> Iterator[None]:
        """Profile the block; kernels on the device are listed as ``device: ...``."""
        with self._profiler() as profiler:
            began = clock()
            yield
            synchronize_device()
            seconds = clock() - began
        table: dict[str, Row] = {"(the call)": {"seconds": seconds, "calls": 1}}
        for event in profiler.key_averages():
            table[event.key] = {"seconds": event.self_cpu_time_total / 1e6, "calls": event.count}
            device = getattr(event, "self_device_time_total", 0.0) / 1e6
            if device:
                table[f"device: {event.key}"] = {"seconds": device, "calls": event.count}
        self._tables[name] = table

    @staticmethod
    def _profiler() -> Any:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        return torch.profiler.profile(activities=kinds)


class Functions(Tables):
    """Python's profiler: functions of the main thread, by their own seconds; ``cumulative:`` with what they call."""

    @contextmanager
    def profiled(self, name: str) -> Iterator[None]:
        """Profile the block."""
        profiler = cProfile.Profile()
        profiler.enable()
        try:
            yield
            synchronize_device()
        finally:
            profiler.disable()
        table: dict[str, Row] = {}
        stats: Any = pstats.Stats(profiler)
        for (file, line, function), (_, calls, own, cumulative, _) in stats.stats.items():
            place = f"{re.sub(r'.*(site|dist)-packages/', '', file)}:{line} {function}" if line else function
            table[place] = {"seconds": own, "calls": calls}
            table[f"cumulative: {place}"] = {"seconds": cumulative, "calls": calls}
        self._tables[name] = table


PROBES: dict[str, type[Probe]] = {"": Probe, "spans": Spans, "operators": Operators, "functions": Functions}


def probe_named(name: str, training: Any) -> Probe:
    """Make the probe of that name; the empty name looks at nothing."""
    return PROBES[name](training)
