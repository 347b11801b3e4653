"""What was compiled, connected and allocated, phase by phase: read where it shows, and never changed.

torch has no public count of any of it. Read instead: Dynamo's compile callbacks and counters, the listener
of Triton's compiler (3.4 on: it alone tells a compiled kernel from a loaded one), NCCL's own log, and what
the driver says of free memory.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import os
import re
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pp_free_warmup._report import synchronize_device
from pp_free_warmup._undo import swapped

NCCL_LOG = "NCCL_DEBUG_FILE"
CONNECTED = re.compile(r"nranks (\d+).*Init COMPLETE")
# Groups of Dynamo's counters, and what of them is kept.
COUNTERS = {"inductor": "fxgraph_cache_", "aot_autograd": "autograd_cache_"}
OUTSIDE = ""


@dataclass
class Phase:
    """What happened while one phase was the innermost.

    Attributes:
        seconds: How long, work on the device included.
        graphs: What made torch.compile compile or load a graph, once per graph: ``DYNAMO``, ``LAZY_BACKWARD``.
        counters: How much Inductor's and AOTAutograd's counters of cache hits and misses rose.
        triton_compiled: Triton kernels that were compiled.
        triton_loaded: Triton kernels that came from the cache.
        communicators: The size of each NCCL communicator that was created, by NCCL's log; needs
            ``NCCL_DEBUG=INFO`` and ``NCCL_DEBUG_FILE`` in the environment from the start.
        children_cpu_s: CPU seconds of ended child processes: compilers.
        out_of_pool_bytes: How much device memory outside of torch's allocator grew; other processes' counts too.
    """

    seconds: float = 0.0
    graphs: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    triton_compiled: int = 0
    triton_loaded: int = 0
    communicators: list[int] = field(default_factory=list)
    children_cpu_s: float = 0.0
    out_of_pool_bytes: int = 0

    @property
    def kernels(self) -> int:
        """How much was compiled: graphs, Inductor's cache misses and Triton kernels together; 0 if nothing."""
        missed = sum(count for name, count in self.counters.items() if name.endswith(("_miss", "_bypass")))
        return len(self.graphs) + missed + self.triton_compiled

    def to_dict(self) -> dict[str, Any]:
        """Return what is not zero, and the seconds."""
        kept = {name: value for name, value in asdict(self).items() if value}
        return {**kept, "seconds": round(self.seconds, 6)}


@dataclass
class _Reading:
    """All sources at one moment."""

    at: float
    counters: Mapping[str, int]
    children_cpu_s: float
    out_of_pool: int


class Monitor:
    """Records phases. They nest; whatever happens counts for the innermost one that is open, and once only.

    Example:
        >>> monitor = Monitor()
        >>> with monitor.watching(), monitor.phase("first step"):
        ...     pass
        >>> monitor.phases["first step"].kernels
        0
    """

    def __init__(self) -> None:
        self.phases: dict[str, Phase] = {}
        self._open = [OUTSIDE]
        self._log = NcclLog(os.environ.get(NCCL_LOG, ""))
        self._last = _read()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record for the block; callbacks are registered at its begin and taken out at its end."""
        from torch._dynamo.callback import callback_handler

        started = self._started
        callback_handler.register_start_callback(started)
        with ExitStack() as undo:
            compilation = _triton_compilation()
            if compilation is not None:
                undo.enter_context(swapped(compilation, "listener", self._listening(compilation.listener)))
            self._edge()
            self._log.new()
            try:
                yield
            finally:
                self._edge()
                if started in callback_handler.start_callbacks:  # torch._dynamo.reset() drops them all
                    callback_handler.remove_start_callback(started)

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Count what happens in the block for *name*; a name that comes again goes on counting."""
        self._edge()
        self._open.append(name)
        try:
            yield self._phase
        finally:
            self._edge()
            self._open.pop()

    @property
    def _phase(self) -> Phase:
        return self.phases.setdefault(self._open[-1], Phase())

    def _edge(self) -> None:
        """Book what the sources say since the last edge on the open phase."""
        synchronize_device()
        now, last, phase = _read(), self._last, self._phase
        phase.seconds += now.at - last.at
        phase.children_cpu_s += now.children_cpu_s - last.children_cpu_s
        phase.out_of_pool_bytes += now.out_of_pool - last.out_of_pool
        for name, count in now.counters.items():
            grown = count - last.counters.get(name, 0)
            if grown:
                phase.counters[name] = phase.counters.get(name, 0) + grown
        phase.communicators += self._log.new()
        self._last = _read()  # reading takes time, too, which is nobody's

    def _started(self, *arguments: Any) -> None:
        """Note one compile; Dynamo hands over what caused it (torch 2.6 and earlier: nothing)."""
        trigger = getattr(arguments[0], "callback_trigger", None) if arguments else None
        self._phase.graphs.append(getattr(trigger, "name", "DYNAMO"))

    def _listening(self, before: Callable[..., None] | None) -> Callable[..., None]:
        def listener(*, cache_hit: bool, **told: Any) -> None:
            if cache_hit:
                self._phase.triton_loaded += 1
            else:
                self._phase.triton_compiled += 1
            if before is not None:
                before(cache_hit=cache_hit, **told)

        return listener


class NcclLog:
    """Reads from NCCL's log of this process which communicators were created.

    Args:
        pattern: The value of ``NCCL_DEBUG_FILE``; ``%h`` and ``%p`` stand for host and process.
    """

    def __init__(self, pattern: str) -> None:
        path = Path(pattern)
        self._folder = path.parent if pattern else None
        self._name = glob.escape(path.name).replace("%h", "*").replace("%p", str(os.getpid()))
        self._read = 0

    def new(self) -> list[int]:
        """Return the number of ranks of each communicator that was completed since the last call."""
        found = [] if self._folder is None else list(self._folder.glob(self._name))
        if not found:
            return []
        with found[0].open("rb") as log:
            log.seek(self._read)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]  # a line that is being written is read next time
        self._read += len(whole)
        return [int(ranks) for ranks in CONNECTED.findall(whole.decode(errors="replace"))]


def _read() -> _Reading:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return _Reading(time.monotonic(), _counters(), children.ru_utime + children.ru_stime, _out_of_pool())


def _counters() -> dict[str, int]:
    """Copy the counters that are kept; a group that does not exist is not made by asking."""
    from torch._dynamo.utils import counters

    return {
        f"{group}.{name}": int(count)
        for group, prefix in COUNTERS.items()
        if group in counters
        for name, count in counters[group].items()
        if name.startswith(prefix)
    }


def _out_of_pool() -> int:
    """Return the device memory in use that torch's allocator does not hold: contexts, NCCL, kernels."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _triton_compilation() -> Any:
    """Return Triton's settings of its compiler, if Triton is installed and has the listener."""
    if importlib.util.find_spec("triton") is None:
        return None
    knobs = getattr(importlib.import_module("triton"), "knobs", None)
    compilation = getattr(knobs, "compilation", None)
    return compilation if hasattr(compilation, "listener") else None
