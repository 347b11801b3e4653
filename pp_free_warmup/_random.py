"""The caller's random number generators: Python, NumPy, torch, CUDA and Megatron's tracker.

A state is always saved as *contents* and set on the *same* generator objects:
others hold references to them (a CUDA graph registers its generator), and a
graph-safe handle saved in place of the bytes would follow the generator.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._generators import set_state, state_of


@dataclass(frozen=True, eq=False, slots=True)
class _DeviceState:
    """One CUDA generator: what it draws from (a tracker may have lent it another), and the bytes."""

    generator: Any
    drawn_from: Any
    contents: torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class _States:
    """Every generator at one moment."""

    python: Any
    numpy: dict[str, Any] | None
    cpu: torch.Tensor
    devices: tuple[_DeviceState, ...]
    tracker: megatron.TrackerContents
    private: tuple[tuple[Any, Any], ...] = ()


class CallerRandom:
    """Save the caller's random state, draw freely, put it back.

    NumPy counts only if something imported it, CUDA only if it is initialised, Megatron's tracker
    only if it exists: nothing is imported, initialised or created here.

    Example:
        >>> caller = CallerRandom()
        >>> caller.read()
        >>> drawn = torch.rand(3)
        >>> caller.set()
        >>> bool((torch.rand(3) == drawn).all())
        True
    """

    def __init__(self) -> None:
        self._saved: list[_States] = []
        self.draws = 0  # in how many blocks of `as_caller` something was drawn
        self.around: list[Callable[[], AbstractContextManager[None]]] = []  # entered around `as_caller`, too

    @staticmethod
    def digests() -> dict[str, str]:
        """Return a short text per generator that tells its present state, by the generator's name."""
        return _digests(_read())

    def read(self) -> None:
        """Save the present state. May be nested; each `read` needs its `set`."""
        self._saved.append(_read())

    def also(self, generators: Iterable[Any]) -> None:
        """Let the latest `read` cover more private generators of torch, NumPy and Python, as they are now."""
        if not self._saved:
            return
        own = [torch.default_generator, *torch.cuda.default_generators]
        private = [(one, state_of(one)) for one in generators if not any(one is each for each in own)]
        self._saved[-1] = replace(self._saved[-1], private=(*self._saved[-1].private, *private))

    def set(self) -> None:
        """Put back what the latest `read` saved, and what `as_caller` drew since."""
        _set(self._saved.pop())

    @contextmanager
    def as_caller(self) -> Iterator[None]:
        """Run the block as if nobody had drawn since `read`; what it draws stays drawn.

        For what would have happened without the warmup too, such as fetching the first batch: a
        shuffling loader draws its order in the caller's stream, and `set` puts back the state
        after that draw. The block may raise: what it drew by then stays drawn as well. Without a
        `read` before it, the present state is the caller's, and the block just runs.
        """
        if not self._saved:
            yield
            return
        private = [generator for generator, _ in self._saved[-1].private]
        mine = _read(private)
        _set(self._saved[-1])
        try:
            with ExitStack() as around:
                for enter in self.around:
                    around.enter_context(enter())
                yield
        finally:
            now = _read(private)
            self.draws += _digests(now) != _digests(self._saved[-1])
            self._saved[-1] = now
            _set(mine)


def _read(private: Iterable[Any] = ()) -> _States:
    numpy = sys.modules.get("numpy")
    return _States(
        python=random.getstate(),
        numpy=None if numpy is None else numpy.random.get_state(legacy=False),
        cpu=torch.get_rng_state(),
        devices=tuple(
            _DeviceState(generator, generator.graphsafe_get_state(), generator.get_state())
            for generator in torch.cuda.default_generators  # empty until CUDA is initialised
        ),
        tracker=megatron.read_tracker(),
        private=tuple((generator, state_of(generator)) for generator in private),
    )


def _digests(states: _States) -> dict[str, str]:
    """Hash every generator's contents."""
    raw = {"python": repr(states.python).encode(), "torch": states.cpu.numpy().tobytes()}
    if states.numpy is not None:
        raw["numpy"] = repr({**states.numpy, "state": {k: str(v) for k, v in states.numpy["state"].items()}}).encode()
        raw["numpy"] += states.numpy["state"]["key"].tobytes() if "key" in states.numpy["state"] else b""
    for index, device in enumerate(states.devices):
        raw[f"cuda:{index}"] = device.contents.numpy().tobytes()
    for name, (_, contents) in states.tracker.states.items():
        raw[f"tracker {name}"] = contents.cpu().numpy().tobytes()
    for number, (generator, contents) in enumerate(states.private):
        text = contents.numpy().tobytes() if isinstance(contents, torch.Tensor) else pickle.dumps(contents)
        raw[f"{type(generator).__name__} {number}"] = text
    return {name: hashlib.blake2b(contents, digest_size=12).hexdigest() for name, contents in raw.items()}


def _set(states: _States) -> None:
    """Set every generator, the others too when one fails."""
    with ExitStack() as each:
        each.callback(random.setstate, states.python)
        if states.numpy is not None:
            each.callback(sys.modules["numpy"].random.set_state, states.numpy)
        each.callback(torch.set_rng_state, states.cpu)
        for device in states.devices:
            each.callback(device.generator.set_state, device.contents)
            each.callback(device.generator.graphsafe_set_state, device.drawn_from)
        each.callback(megatron.set_tracker, states.tracker)
        for generator, contents in states.private:
            each.callback(set_state, generator, contents)
