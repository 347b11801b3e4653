"""The monitor books what was compiled and connected on the phase in which it happened, and leaves nothing behind."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters

from pp_free_warmup._monitor import NCCL_LOG, Monitor, NcclLog, Phase

LINE = "host:1:1 [0] NCCL INFO ncclCommInitRankConfig comm 0x1 rank 0 nranks {} cudaDev 0 commId 0x2 - Init {}\n"


def _compiled(**options):
    """A compiled function that no other test has compiled."""
    return torch.compile(lambda number: (number * 2).sum(), **options)


def test_a_compile_counts_for_the_phase_in_which_it_happens():
    """The first call compiles a graph; the same call again does not."""
    monitor, function = Monitor(), _compiled(backend="eager")
    with monitor.watching():
        with monitor.phase("first"):
            function(torch.ones(3))
        with monitor.phase("second"):
            function(torch.ones(3))

    assert monitor.phases["first"].graphs == ["DYNAMO"]
    assert (monitor.phases["first"].kernels, monitor.phases["second"].kernels) == (1, 0)


def test_a_backward_compiled_late_is_seen():
    """A forward that was compiled in one phase and its backward in the next count for one each."""
    monitor, function = Monitor(), _compiled(backend="aot_eager")
    with monitor.watching():
        with monitor.phase("forward"):
            loss = function(torch.ones(3, requires_grad=True))
        with monitor.phase("backward"):
            loss.backward()

    assert monitor.phases["forward"].graphs == ["DYNAMO"]
    assert monitor.phases["backward"].graphs in ([], ["LAZY_BACKWARD"])


def test_phases_are_exclusive():
    """An inner phase's seconds and counts are not the outer one's; a name that comes again goes on counting."""
    monitor, group = Monitor(), counters["inductor"]
    with monitor.watching(), monitor.phase("outer"):
        for _ in range(2):
            with monitor.phase("inner"):
                time.sleep(0.05)
                group["fxgraph_cache_miss"] += 1
    group["fxgraph_cache_miss"] -= 2

    assert monitor.phases["inner"].seconds >= 0.1
    assert monitor.phases["outer"].seconds < 0.05
    assert monitor.phases["inner"].counters == {"inductor.fxgraph_cache_miss": 2}
    assert monitor.phases["outer"].kernels == 0


def test_nothing_is_left_behind():
    """After the block there is no callback, and what happens then is not counted."""
    before = list(callback_handler.start_callbacks)
    monitor = Monitor()
    with pytest.raises(ValueError, match="stop"), monitor.watching(), monitor.phase("failed"):
        raise ValueError("stop")
    _compiled(backend="eager")(torch.ones(4))

    assert callback_handler.start_callbacks == before
    assert sum(phase.kernels for phase in monitor.phases.values()) == 0


def test_a_reset_of_the_compiler_is_survived():
    """torch.compiler.reset() drops all callbacks; taking ours out then is no error."""
    monitor = Monitor()
    with monitor.watching():
        torch.compiler.reset()


def test_triton_kernels_are_told_from_cached_ones():
    """The listener tells compiled from loaded, and passes on to the listener that was there."""
    triton = pytest.importorskip("triton")
    heard = []
    triton.knobs.compilation.listener = lambda **told: heard.append(told["cache_hit"])
    told = {"src": None, "metadata": {}, "metadata_group": {}, "times": None}
    monitor = Monitor()
    try:
        with monitor.watching(), monitor.phase("first"):
            for hit in (False, True, True):
                triton.knobs.compilation.listener(cache_hit=hit, **told)
        triton.knobs.compilation.listener(cache_hit=False, **told)
    finally:
        del triton.knobs.compilation.listener

    assert (monitor.phases["first"].triton_compiled, monitor.phases["first"].triton_loaded) == (1, 2)
    assert heard == [False, True, True, False]


def test_communicators_are_read_from_nccls_log(tmp_path, monkeypatch):
    """A completed communicator counts once, for the phase in which NCCL wrote so; unfinished lines wait."""
    monkeypatch.setenv(NCCL_LOG, f"{tmp_path}/nccl.%h.%p")
    log = tmp_path / f"nccl.some-host.{os.getpid()}"
    log.write_text(LINE.format(2, "COMPLETE"))
    (tmp_path / "nccl.some-host.1").write_text(LINE.format(9, "COMPLETE"))
    monitor = Monitor()
    with monitor.watching():
        with monitor.phase("first"), log.open("a") as written:
            written.write(LINE.format(4, "START") + LINE.format(4, "COMPLETE") + LINE.format(8, "COMPLETE")[:-1])
        with monitor.phase("second"), log.open("a") as written:
            written.write("\n")

    assert (monitor.phases["first"].communicators, monitor.phases["second"].communicators) == ([4], [8])
    assert NcclLog("").new() == []


def test_a_phase_says_what_is_not_zero():
    """The dict of a phase has its seconds, and else only what happened."""
    assert Phase(seconds=1.5).to_dict() == {"seconds": 1.5}
    assert Phase(seconds=1.5, communicators=[2]).to_dict() == {"communicators": [2], "seconds": 1.5}
