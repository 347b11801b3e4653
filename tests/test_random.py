"""The caller's random numbers continue as if nobody had drawn in between."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import suppress
from types import ModuleType

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from pp_free_warmup._random import CallerRandom
from pp_free_warmup._undo import swapped
from pp_free_warmup.testing import cuda_on_cpu

SEEDED = "model-parallel-rng"


@pytest.fixture
def gpu():
    """Have a "GPU", and no tracker yet."""
    with (
        cuda_on_cpu(),
        swapped(megatron_random, "_CUDA_RNG_STATE_TRACKER", None),
        swapped(megatron_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False),
    ):
        yield


@pytest.fixture(params=["bytes", "graph-safe"])
def tracker(request, gpu):
    """Megatron's tracker in both of its kinds."""
    with swapped(torch.cuda.CUDAGraph, "register_generator_state", None):
        megatron_random.initialize_rng_tracker(use_cudagraphable_rng=request.param == "graph-safe")
    tracker = megatron_random.get_cuda_rng_tracker()
    tracker.add(SEEDED, 1)
    return tracker


def _dropped():
    """Return the mask of an eager dropout."""
    return torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()


def _forked(tracker):
    with tracker.fork(SEEDED):
        return _dropped()


STREAMS = {
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002
    "numpy's second gaussian": lambda: float(np.random.standard_normal()),  # noqa: NPY002
    "torch": lambda: torch.rand(3).tolist(),
    "cuda": _dropped,
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_continues(name, gpu):
    """The next draw is the one that the caller would have had."""
    draw = STREAMS[name]
    caller = CallerRandom()
    draw()
    caller.read()
    expected = [draw(), draw()]
    caller.set()

    assert [draw(), draw()] == expected


def test_the_trackers_stream_continues(tracker):
    """Under Megatron's fork, with the states as bytes and as live generators."""
    caller = CallerRandom()
    caller.read()
    expected = [_forked(tracker), _dropped(), _forked(tracker)]
    caller.set()

    assert [_forked(tracker), _dropped(), _forked(tracker)] == expected
    assert expected[0] != expected[2]


def test_the_tracker_gets_its_own_objects_back(tracker):
    """Not equal ones: CUDA graphs registered them, and others alias the dict."""
    states, seeds, entry = tracker.states_, tracker.seeds_, tracker.states_[SEEDED]
    caller = CallerRandom()
    caller.read()
    _forked(tracker)
    tracker.set_states(tracker.get_states())
    tracker.reset()
    caller.set()

    assert tracker.states_ is states
    assert tracker.seeds_ is seeds
    assert tracker.states_[SEEDED] is entry
    assert tracker.is_initialized()


def test_an_entry_that_the_pass_added_goes(tracker):
    """Its name and its seed are free again."""
    caller = CallerRandom()
    caller.read()
    tracker.add("new", 7)
    caller.set()
    tracker.add("new", 7)

    assert list(tracker.states_) == [SEEDED, "new"]


def test_an_interrupted_fork_is_undone(tracker):
    """The device draws from the caller's generator again, under the name that was current (from 0.16)."""
    drawn_from, fields = torch.cuda.default_generators[0].drawn_from, dict(vars(tracker))
    caller = CallerRandom()
    caller.read()
    fork = tracker.fork(SEEDED)
    fork.__enter__()
    _dropped()
    caller.set()

    assert torch.cuda.default_generators[0].drawn_from is drawn_from
    assert vars(tracker) == fields
    with suppress(Exception):  # leaving it late is an error from 0.16 on
        fork.__exit__(None, None, None)


def test_a_tracker_is_never_created(gpu):
    """Creating one fixes its kind for the process."""
    caller = CallerRandom()
    caller.read()
    with caller.as_caller():
        pass
    caller.set()

    assert megatron_random._CUDA_RNG_STATE_TRACKER is None
    assert not megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED


def test_a_tracker_that_the_pass_created_goes(gpu):
    """The trainer may still choose its kind."""
    caller = CallerRandom()
    caller.read()
    megatron_random.get_cuda_rng_tracker()
    caller.set()

    assert megatron_random._CUDA_RNG_STATE_TRACKER is None
    assert not megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED


def test_the_inference_trackers_states_come_back(gpu):
    """Its ``set_states`` does nothing, so nothing may rely on it."""
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True)
    tracker = megatron_random.get_cuda_rng_tracker()
    tracker.states_["kept"] = torch.get_rng_state()
    caller = CallerRandom()
    caller.read()
    tracker.states_.clear()
    caller.set()

    assert list(tracker.states_) == ["kept"]


def test_transformer_engines_alias_of_the_states_comes_back(gpu):
    """Its tracker keeps the states in a module global as well, which its ``set_states`` re-binds."""
    home = ModuleType("engine")
    home._ALL_ACTIVE_RNG_STATES = {}

    class EngineTracker(megatron_random.CudaRNGStatesTracker):
        __module__ = "engine"

        def set_states(self, states):
            super().set_states(states)
            home._ALL_ACTIVE_RNG_STATES = states

    sys.modules["engine"] = home
    try:
        tracker = EngineTracker()
        megatron_random._CUDA_RNG_STATE_TRACKER = tracker
        tracker.set_states({SEEDED: torch.Generator()})
        expected, caller = _random_of(tracker), CallerRandom()
        caller.read()
        states = tracker.states_
        _random_of(tracker)
        tracker.set_states(tracker.get_states())
        caller.set()
    finally:
        del sys.modules["engine"]

    assert home._ALL_ACTIVE_RNG_STATES is states
    assert tracker.states_ is states
    assert _random_of(tracker) != expected  # the caller had drawn once itself


def _random_of(tracker):
    return torch.rand(4, generator=tracker.states_[SEEDED]).tolist()


# --- as_caller ---


@pytest.fixture
def everything(tracker):
    """Draw from every stream once, the tracker's included."""
    return lambda: [torch.rand(3).tolist(), random.random(), STREAMS["numpy"](), _dropped(), _forked(tracker)]


def test_what_the_caller_draws_in_the_pass_stays_drawn(everything):
    """A loader that shuffles at its first fetch draws what it would have drawn, and draws it once."""
    caller = CallerRandom()
    caller.read()
    fetched, then = everything(), everything()
    caller.set()
    caller.read()
    everything()
    with caller.as_caller():
        fetched_in_the_pass = everything()
    everything()
    caller.set()

    assert fetched_in_the_pass == fetched
    assert everything() == then


def test_several_fetches_continue_one_stream(everything):
    """The second fetch goes on where the first one stopped."""
    caller = CallerRandom()
    caller.read()
    expected = [everything(), everything(), everything()]
    caller.set()
    caller.read()
    found = []
    for _ in range(2):
        everything()
        with caller.as_caller():
            found.append(everything())
    caller.set()

    assert [*found, everything()] == expected


def test_a_fetch_that_raises_keeps_what_it_drew(everything):
    """An exhausted iterator may have drawn before it stopped; without the warmup it would have too."""
    caller = CallerRandom()
    caller.read()
    expected = [everything(), everything()]
    caller.set()
    caller.read()
    with pytest.raises(StopIteration), caller.as_caller():
        assert everything() == expected[0]
        raise StopIteration
    caller.set()

    assert everything() == expected[1]


def test_a_fetch_in_a_nested_read_belongs_to_the_innermost(gpu):
    """Each `read` has a state of its own."""
    outer = CallerRandom()
    outer.read()
    expected = torch.rand(3).tolist()
    outer.read()
    with outer.as_caller():
        torch.rand(1)
    outer.set()
    outer.set()

    assert torch.rand(3).tolist() == expected


def test_without_a_read_the_present_state_is_the_callers(gpu):
    """A skipped warmup fetches nothing; should anybody fetch, it is the caller's own draw."""
    state = torch.get_rng_state()
    with CallerRandom().as_caller():
        drawn = torch.rand(3)
    after = torch.rand(3)
    torch.set_rng_state(state)

    assert torch.equal(torch.rand(6), torch.cat([drawn, after]))


def test_the_pass_continues_its_own_stream_after_a_fetch(gpu):
    """Two masks of the pass are not the same for a fetch in between."""
    caller = CallerRandom()
    caller.read()
    first = torch.rand(3).tolist()
    with caller.as_caller():
        assert torch.rand(3).tolist() == first
    second = torch.rand(3).tolist()
    caller.set()

    assert second != first
    assert torch.rand(3).tolist() == second


def test_one_generator_that_fails_does_not_stop_the_others(gpu):
    """All the others are set, then the error comes out."""
    caller = CallerRandom()
    caller.read()
    expected = [torch.rand(3).tolist(), random.random()]
    with pytest.raises(RuntimeError, match="stuck"), swapped(np.random, "set_state", _stuck):
        caller.set()

    assert [torch.rand(3).tolist(), random.random()] == expected


def _stuck(_state):
    raise RuntimeError("stuck")


def test_reading_imports_nothing():
    """NumPy is saved only where something imported it; CUDA stays as it is."""
    script = """
import sys
import torch
from pp_free_warmup._random import CallerRandom

for name in [name for name in sys.modules if name.partition(".")[0] == "numpy"]:
    del sys.modules[name]
caller = CallerRandom()
caller.read()
caller.set()
assert "numpy" not in sys.modules
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
