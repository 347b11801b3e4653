"""Megatron's tracker of CUDA random states (`tensor_parallel/random.py`, 0.14 to 0.19).

Read and put back by contents, on the very same objects. Megatron's own
`_get_all_rng_states` is of no use here: for graph-safe trackers it returns live
handles, so setting them again changes nothing; and `get_cuda_rng_tracker`
*creates* a tracker, and with it fixes its kind for the process.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random

from pp_free_warmup._undo import refill

State = torch.Tensor | torch.Generator
"""What a tracker keeps per name: the bytes, or (graph-safe trackers) a generator."""

ACTIVE = "_ALL_ACTIVE_RNG_STATES"
"""Transformer Engine's second reference to its tracker's states, a global beside the tracker's class."""


@dataclass(frozen=True, eq=False, slots=True)
class TrackerContents:
    """A tracker as it was: the objects, and apart from them what was in them.

    Attributes:
        tracker: The tracker in Megatron's global, or None where there was none.
        initialized: Megatron's flag beside that global.
        fields: The tracker's own attributes, among them the dict ``states_`` and the set ``seeds_``.
        states: Per name the object and a copy of its bytes.
        seeds: What ``seeds_`` held.
        active: Modules that keep a second reference to the states, and what it was.
    """

    tracker: Any
    initialized: bool
    fields: dict[str, Any]
    states: dict[str, tuple[State, torch.Tensor]]
    seeds: frozenset[int]
    active: tuple[tuple[ModuleType, Any], ...]


def read_tracker() -> TrackerContents:
    """Copy the contents of Megatron's tracker; never create one."""
    tracker = megatron_random._CUDA_RNG_STATE_TRACKER
    fields = {} if tracker is None else dict(vars(tracker))
    homes = (sys.modules[kind.__module__] for kind in type(tracker).__mro__)
    return TrackerContents(
        tracker=tracker,
        initialized=megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED,
        fields=fields,
        states={name: (state, bytes_of(state)) for name, state in fields.get("states_", {}).items()},
        seeds=frozenset(fields.get("seeds_", ())),
        active=tuple((home, vars(home)[ACTIVE]) for home in homes if ACTIVE in vars(home)),
    )


def set_tracker(contents: TrackerContents) -> None:
    """Put *contents* back, each into the object it was read from; what was added since goes."""
    megatron_random._CUDA_RNG_STATE_TRACKER = contents.tracker
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = contents.initialized
    if contents.tracker is None:
        return
    refill(vars(contents.tracker), contents.fields)
    refill(contents.fields.get("states_", {}), {name: state for name, (state, _) in contents.states.items()})
    refill(contents.fields.get("seeds_", set()), contents.seeds)
    with ExitStack() as each:
        for home, active in contents.active:
            each.callback(setattr, home, ACTIVE, active)
        for state, saved in contents.states.values():
            each.callback(write_bytes, state, saved)


def bytes_of(state: State) -> torch.Tensor:
    """Return a copy of a random state: a ByteTensor that nobody else holds."""
    return state.get_state() if isinstance(state, torch.Generator) else state.clone()


def write_bytes(state: State, saved: torch.Tensor) -> None:
    """Write *saved* into the same generator or tensor it was read from."""
    if isinstance(state, torch.Generator):
        state.set_state(saved)
    else:
        with torch.inference_mode():  # it is an inference tensor where log-probs drew last
            state.copy_(saved)
