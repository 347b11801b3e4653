"""Private random generators of torch, NumPy and Python: what they are, what they would draw next, and setting that."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import torch


def is_generator(of: type) -> bool:
    """Tell whether objects of this class draw from a state of their own that can be read and set."""
    numpy = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random)
    known = kinds if numpy is None else (*kinds, numpy.random.Generator, numpy.random.RandomState)
    return issubclass(of, known) and not issubclass(of, random.SystemRandom)


def state_of(generator: Any) -> Any:
    """Return a copy of what a generator would draw from next."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return copy.deepcopy(_bits_of(generator).state)


def set_state(generator: Any, state: Any) -> None:
    """Let a generator draw from *state* next."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _bits_of(generator).state = state


def _bits_of(generator: Any) -> Any:
    """Return where a generator of NumPy keeps its state (`Generator`, and the older `RandomState`)."""
    return getattr(generator, "bit_generator", None) or generator._bit_generator
