"""Stand in Megatron's schedules for as long as a warmup block is armed.

Consumers bind `get_forward_backward_func` at import, so patching that name reaches
nobody; but it looks the three schedule functions up in the globals of
``megatron.core.pipeline_parallel.schedules`` at every call (0.12 to 0.20-dev). So
those globals are rebound while at least one block is armed, and the very same
objects are put back when the last block leaves.

A schedule function that somebody holds already (``from ... import``) is not reached that way. It looks
`forward_step` up in the same globals; so that name is watched until a schedule is reached, or until the
first step shows that one was not.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import wrapt

from pp_free_warmup import _megatron as megatron
from pp_free_warmup.errors import WrongCall

Schedule = Callable[..., Any]


class Block(Protocol):
    """What an armed block answers for.

    Attributes:
        called: True once a schedule was called while the block was armed, through whatever door.
        reports: What was done for its model.
    """

    called: bool
    reports: list[Any]

    def takes(self, keywords: Mapping[str, Any]) -> bool:
        """Tell whether this call's model is the block's."""

    def run(self, schedule: Schedule, keywords: dict[str, Any]) -> Any:
        """Warm up if that is still to be done, then run the schedule."""

    def passed_by(self) -> None:
        """Hear that a real step runs, and that no schedule was called while the block was armed."""


class _Stay:
    """One stretch of time in which the schedules are patched: wrappers of an earlier stay are inert."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.replaced: dict[str, tuple[Any, Any]] = {}
        self._watch: Any = None

    def through(self, schedule: Schedule, instance: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if not self.blocks:  # the wrapper outlived its block
            return schedule(*args, **keywords)
        refuse_positional(args)
        self.rest()
        block = next((block for block in reversed(self.blocks) if block.takes(keywords)), None)
        return schedule(**keywords) if block is None else block.run(schedule, keywords)

    def watch(self) -> None:
        """Notice the next step, unless a schedule is reached before."""
        module = megatron.schedule_module()
        if self._watch is None:
            self._watch = module.forward_step = wrapt.FunctionWrapper(module.forward_step, self._stepped)

    def rest(self) -> None:
        """Watch no longer: from here on a step costs what it always cost."""
        if self._watch is not None:
            with _lock:
                module, watch, self._watch = megatron.schedule_module(), self._watch, None
                if watch is not None and module.forward_step is watch:
                    module.forward_step = watch.__wrapped__

    def _stepped(self, step: Any, instance: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if self._watch is not None:
            self.rest()
            for block in [block for block in self.blocks if not block.called]:
                block.passed_by()
        return step(*args, **keywords)


_lock = threading.RLock()
_stay = _Stay()


def arm(block: Block) -> None:
    """Let this block see every schedule that is fetched and called from now on."""
    with _lock:
        if not _stay.blocks:
            _install()
        _stay.blocks.append(block)
        if not block.called:
            _stay.watch()


def disarm(block: Block, depth: int) -> None:
    """Take the block out; the last one out puts Megatron's own objects back. Blocks may leave in any order.

    Args:
        block: The block; nothing happens if it is not armed.
        depth: Frames from the caller to the user's line, for a warning.
    """
    with _lock:
        place = next((i for i in reversed(range(len(_stay.blocks))) if _stay.blocks[i] is block), None)
        if place is None:
            return
        del _stay.blocks[place]
        if not _stay.blocks:
            _stay.rest()
            _remove(depth + 2)


def armed() -> list[Block]:
    """Return the blocks that are armed now, the innermost last; one that was entered twice is there twice."""
    return _stay.blocks


def reached() -> None:
    """Let every armed block know that a schedule was called, through whatever door."""
    _stay.rest()
    for block in _stay.blocks:
        block.called = True


def original_of(function: Any) -> Schedule | None:
    """Return the function itself if it is one of Megatron's schedules, else None.

    Compared by identity: a wrapt wrapper equals and hashes like what it wraps.
    """
    globals_ = vars(megatron.schedule_module())
    with _lock:
        originals = [_stay.replaced[name][0] if name in _stay.replaced else globals_[name] for name in _names()]
    return next((original for original in originals if original is function), None)


def inner_schedule(function: Schedule) -> Schedule:
    """Return what stands behind the wrapper of an armed block; any other function as it is."""
    with _lock:
        behind = [original for original, wrapper in _stay.replaced.values() if wrapper is function]
    return behind[0] if behind else function


def refuse_positional(args: tuple[Any, ...]) -> None:
    """Raise if a schedule was called with positional arguments (its own are keyword-only).

    Raises:
        WrongCall: Always when *args* is not empty.
    """
    if args:
        raise WrongCall(
            "A pipeline schedule was called with positional arguments.",
            found=f"{len(args)} positional; expected keywords only, as Megatron's schedules take them.",
            matters="The warmup cannot tell the model from the data, and the schedule itself would refuse.",
            do="Name every argument: forward_backward_func(forward_step_func=..., data_iterator=..., model=...).",
        )


def _names() -> tuple[str, ...]:
    return megatron.SCHEDULE_NAMES


def _install() -> None:
    global _stay  # noqa: PLW0603 - the one piece of process-wide state, under _lock
    megatron.check_contract()
    _stay = _Stay()
    module = megatron.schedule_module()
    for name in _names():
        original = getattr(module, name)
        wrapper = wrapt.FunctionWrapper(original, _stay.through)
        _stay.replaced[name] = (original, wrapper)
        setattr(module, name, wrapper)


def _remove(depth: int) -> None:
    module = megatron.schedule_module()
    kept = []
    for name, (original, wrapper) in _stay.replaced.items():
        if getattr(module, name, None) is wrapper:
            setattr(module, name, original)
        else:
            kept.append(name)
    _stay.replaced.clear()
    if kept:
        warnings.warn(
            f"pp_free_warmup: {', '.join(kept)} in megatron.core.pipeline_parallel.schedules was replaced by someone "
            "else while a pipeline_warmup block was open. That replacement is left in place; the warmup's wrapper "
            "underneath it now only passes calls through.",
            RuntimeWarning,
            stacklevel=depth,
        )
