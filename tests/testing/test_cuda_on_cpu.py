"""Real Megatron runs where "cuda" means the CPU, and nothing of that stays behind."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from pp_free_warmup.testing import cuda_on_cpu, pretrain_on_cpu

LENT_TO = (
    torch,
    torch.cuda,
    torch.cuda.random,
    torch.cuda.graphs,
    torch.nn.functional,
    torch.nn.init,
    torch.Tensor,
    megatron_random,
    moe_utils,
    token_dispatcher,
)


def _bindings() -> dict[tuple[str, str], Any]:
    return {(owner.__name__, name): value for owner in LENT_TO for name, value in vars(owner).items()}


def _moved(draw: Any) -> tuple[bool, bool]:
    """Tell whether *draw* moves the CPU's generator, and whether it moves "cuda"'s."""
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state()
    draw()
    return not torch.equal(cpu, torch.get_rng_state()), not torch.equal(cuda, torch.cuda.get_rng_state())


@pytest.mark.parametrize(
    "context",
    [
        cuda_on_cpu,
        pytest.param(
            pretrain_on_cpu,
            marks=pytest.mark.skipif(
                importlib.util.find_spec("megatron.training") is None, reason="this wheel has no megatron.training"
            ),
        ),
    ],
)
def test_the_very_same_objects_come_back(context: Any) -> None:
    """After the block every attribute is the object that it was before, also when the block raises."""
    with context():
        pass  # imports what it needs, once
    before, modules = _bindings(), dict(sys.modules)

    with pytest.raises(RuntimeError, match="body"), context():
        during = _bindings()
        raise RuntimeError("body")

    after = _bindings()
    assert [name for name in before if during.get(name) is not before[name]], "nothing was lent"
    assert before.keys() == after.keys()
    assert [name for name in before if after[name] is not before[name]] == []
    assert sys.modules == modules


def test_an_inner_block_shares_the_outer_device() -> None:
    """Leaving a nested block leaves the outer one's generator in place."""
    with cuda_on_cpu():
        generator = torch.cuda.default_generators[0]
        with cuda_on_cpu():
            assert torch.cuda.default_generators[0] is generator
        assert torch.cuda.default_generators[0] is generator
        assert torch.zeros(1, device="cuda").device.type == "cpu"


def test_transformer_engine_is_hidden_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed Transformer Engine cannot be imported inside, and its modules are back outside."""
    import types

    engine, part = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    monkeypatch.setitem(sys.modules, "transformer_engine", engine)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", part)

    with cuda_on_cpu(), pytest.raises(ModuleNotFoundError):
        import transformer_engine.pytorch  # noqa: F401

    assert sys.modules["transformer_engine"] is engine
    assert sys.modules["transformer_engine.pytorch"] is part


@pytest.mark.parametrize("name", ["zeros", "ones", "empty", "rand", "randn"])
def test_factories_make_cpu_tensors(name: str) -> None:
    """A factory asked for a CUDA tensor gives one on the CPU."""
    with cuda_on_cpu():
        for device in ("cuda", "cuda:0", torch.device("cuda"), 0, torch.cuda.current_device()):
            assert getattr(torch, name)(2, device=device).device.type == "cpu"


def test_pinned_memory_is_plain_memory() -> None:
    """What Megatron pins to copy it to a device is made where nothing can be pinned too."""
    with cuda_on_cpu():
        assert torch.tensor([1, 2], device="cpu", pin_memory=True).cuda(non_blocking=True).tolist() == [1, 2]
        assert not torch.empty(2, pin_memory=True).is_pinned()


def test_tensors_call_themselves_cuda() -> None:
    """``Tensor.cuda`` is the tensor itself, and ``Tensor.type`` gives the text Megatron's optimizer asks for."""
    with cuda_on_cpu():
        tensor = torch.zeros(1)
        assert tensor.cuda() is tensor
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.type(torch.float64).dtype == torch.float64
    assert tensor.type() == "torch.FloatTensor"


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.nn.functional.dropout(torch.ones(8), 0.5),
        lambda: torch.nn.Dropout(0.5)(torch.ones(8)),
        lambda: torch.nn.init.normal_(torch.empty(8)),
        lambda: torch.rand(8, device="cuda"),
        lambda: torch.randint(0, 9, (8,), device="cuda"),
    ],
)
def test_eager_device_draws_move_only_the_cuda_generator(draw: Any) -> None:
    """Dropout, weight initialisation and device factories never touch the CPU's default generator."""
    with cuda_on_cpu():
        assert _moved(draw) == (False, True)


def test_cpu_draws_move_only_the_cpu_generator() -> None:
    """A plain CPU draw leaves "cuda" alone."""
    with cuda_on_cpu():
        assert _moved(lambda: torch.rand(8)) == (True, False)


def test_dropout_is_dropout() -> None:
    """The mask keeps about 1 - p of the values, scales them, and lets their gradients through alone."""
    with cuda_on_cpu():
        ones = torch.ones(20_000, requires_grad=True)
        dropped = torch.nn.functional.dropout(ones, 0.25)
        dropped.sum().backward()
    kept = dropped != 0

    assert abs(kept.float().mean().item() - 0.75) < 0.02
    assert torch.equal(dropped[kept], torch.full_like(dropped[kept], 1 / 0.75))
    assert torch.equal(ones.grad, dropped)


@pytest.mark.parametrize("keywords", [{"training": False}, {"p": 0.0}, {"p": 1.0}])
def test_dropout_that_draws_nothing_moves_nothing(keywords: dict[str, Any]) -> None:
    """Evaluation, and the two certain probabilities, give torch's own result."""
    with cuda_on_cpu():
        moved = _moved(lambda: torch.nn.functional.dropout(torch.ones(4), **keywords))
        dropped = torch.nn.functional.dropout(torch.ones(4), **keywords)

    assert not moved[1]
    assert torch.equal(dropped, torch.zeros(4) if keywords.get("p") == 1.0 else torch.ones(4))


def test_the_same_seed_gives_cpu_and_cuda_other_numbers() -> None:
    """``torch.manual_seed`` seeds both, but no state of one passes for a state of the other."""
    with cuda_on_cpu():
        torch.manual_seed(7)
        cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state()
        first = torch.rand(4, device="cuda")
        torch.manual_seed(7)

        assert torch.equal(torch.rand(4, device="cuda"), first)
        assert torch.cuda.initial_seed() == 7
        assert not torch.equal(cpu, cuda)


@pytest.mark.parametrize(
    "graph_safe",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                not hasattr(torch.cuda.CUDAGraph, "register_generator_state"), reason="torch was built without CUDA"
            ),
        ),
    ],
)
def test_megatrons_tracker_decides_the_mask(graph_safe: bool) -> None:
    """Inside a fork the mask follows the tracker's state: put back, the same; another, another."""
    with cuda_on_cpu():
        tracker = megatron_random.CudaRNGStatesTracker(use_cudagraphable_rng=graph_safe)
        tracker.add("stream", 1)
        tracker.add("other", 2)
        outside = torch.cuda.get_rng_state()

        first, second, other = (_mask(tracker, name) for name in ("stream", "stream", "other"))

        assert not torch.equal(first, second), "the stream did not go on"
        assert not torch.equal(first, other), "another state gave the same mask"
        assert torch.equal(torch.cuda.get_rng_state(), outside), "the fork moved the stream outside"


def _mask(tracker: Any, name: str) -> torch.Tensor:
    with tracker.fork(name):
        return torch.nn.functional.dropout(torch.ones(64), 0.5)


def test_a_tracker_state_put_back_gives_the_same_mask() -> None:
    """Setting a tracker's saved bytes repeats its masks: what a guard relies on."""
    with cuda_on_cpu():
        tracker = megatron_random.CudaRNGStatesTracker()
        tracker.add("stream", 1)
        saved = tracker.states_["stream"].clone()
        first = _mask(tracker, "stream")
        tracker.states_["stream"] = saved

        assert torch.equal(_mask(tracker, "stream"), first)


def test_without_its_piece_the_tracker_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with torch's own queue for CUDA's start, two tracker states give one stream of masks."""
    with cuda_on_cpu():
        tracker = megatron_random.CudaRNGStatesTracker()
        tracker.add("stream", 1)
        saved = tracker.states_["stream"].clone()
        queued: list[Any] = []
        monkeypatch.setattr(megatron_random, "_lazy_call", lambda act, **_: queued.append(act))
        first = _mask(tracker, "stream")
        tracker.states_["stream"] = saved

        assert queued
        assert not torch.equal(_mask(tracker, "stream"), first)
        monkeypatch.undo()


def test_fused_functions_run_eagerly_unless_jit_is_asked_for() -> None:
    """What is decorated with Megatron's ``jit_fuser`` compiles only with ``jit=True``."""
    from megatron.core import jit

    with cuda_on_cpu():
        seen = jit.jit_fuser(_is_compiling)
        assert not seen()
        with cuda_on_cpu(jit=True):
            assert seen()
        assert not seen()


def _is_compiling() -> bool:
    return torch.compiler.is_compiling()


def test_compiled_dropout_still_drops() -> None:
    """Under torch.compile torch's own dropout is traced, and draws from the CPU's generator."""
    with cuda_on_cpu(jit=True):
        dropped = torch.compile(lambda ones: torch.nn.functional.dropout(ones, 0.5), backend="aot_eager")
        moved = _moved(lambda: dropped(torch.ones(64)))
        values = dropped(torch.ones(64)).unique().tolist()

    assert moved == (True, False)
    assert values == [0.0, 2.0]


def test_streams_and_events_are_always_done() -> None:
    """Work on stand-in streams is over when it was asked for, and events measure time."""
    with cuda_on_cpu():
        side, begin, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event()
        begin.record()
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.current_stream())
            side.record_event(end)
        torch.cuda.synchronize()

        assert side.query()
        assert end.query()
        assert begin.elapsed_time(end) >= 0.0
        assert not torch.cuda.is_current_stream_capturing()
