"""What one call of Megatron's schedule says, read once and passed to every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._random import CallerRandom
from pp_free_warmup.errors import NotInitialized, UnsupportedSetup, WrongCall


@dataclass(frozen=True, eq=False, slots=True)
class ScheduleCall:
    """One call of a schedule function; strong references, so it must not outlive the call.

    Attributes:
        keywords: The keyword arguments as the caller passed them.
        chunks: The model chunks of this rank, as passed (wrapped or not), in virtual-stage order.
        iterators: What the caller passed as data, one entry per chunk; None where there is none.
        config: Megatron's config of the first chunk.
        groups: The process groups that this call uses.
        interleaved: True for the schedule with virtual stages.
        random: The caller's random number generators.
        schedule: The schedule function, as called.
        kept: Ids of the tensors that a guard puts back by value.
        taken: Bytes of memory that the warmup takes, by what for.
        before_loss: Called in the pass with each loss function that the forward step returns, before it runs.
    """

    keywords: Mapping[str, Any]
    chunks: tuple[torch.nn.Module, ...]
    iterators: tuple[Any, ...]
    config: Any
    groups: megatron.Groups
    interleaved: bool
    random: CallerRandom
    schedule: Callable[..., Any] | None = None
    kept: set[int] = field(default_factory=set, init=False, repr=False)
    taken: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    before_loss: list[Callable[[Any], None]] = field(default_factory=list, init=False, repr=False)
    _modules: list[torch.nn.Module] = field(default_factory=list, init=False, repr=False)
    _others: list[torch.nn.Module] = field(default_factory=list, init=False, repr=False)

    @property
    def forward_only(self) -> bool:
        """True for log-probs and evaluation, which run no backward."""
        return bool(self.keywords.get("forward_only", False))

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches that the caller asked for."""
        return int(self.keywords["num_microbatches"])

    def modules(self) -> Iterator[torch.nn.Module]:
        """Iterate over every module of every chunk, each once, wrappers included.

        They are looked up once, in the registries: torch's own walk takes longer than most guards.
        """
        if not self._modules:
            self._modules.extend(_reachable(self.chunks))
        return iter(self._modules)

    def reached(self) -> Iterator[torch.nn.Module]:
        """Iterate over `modules`, and over those that only a field or the forward step leads to."""
        yield from self.modules()
        yield from self._others

    def reaches(self, modules: Iterable[torch.nn.Module]) -> None:
        """Note the modules that a pass can reach."""
        known = set(map(id, self.modules()))
        self._others[:] = [module for module in modules if id(module) not in known]

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Iterate over every parameter of every module that is `reached`, each once."""
        registries = (vars(module)["_parameters"] for module in self.reached())
        found = {id(one): one for registry in registries for one in registry.values() if one is not None}
        yield from found.values()

    def configs(self) -> Iterator[Any]:
        """Iterate over the chunks' configs, each object once."""
        yield from {id(config): config for config in map(megatron.config_of, self.chunks)}.values()


def _reachable(chunks: Iterable[torch.nn.Module]) -> Iterable[torch.nn.Module]:
    """Return the chunks and all modules below them, each once, parents first and in the order of registration."""
    found: dict[int, torch.nn.Module] = {}
    waiting = list(chunks)[::-1]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += [child for child in reversed(vars(module)["_modules"].values()) if child is not None]
    return found.values()


def first_chunk(keywords: Mapping[str, Any]) -> torch.nn.Module:
    """Return the first model chunk of a call, as passed.

    Raises:
        UnsupportedSetup: ``model`` is no module and no list of modules.
    """
    model = keywords.get("model")
    chunk = model[0] if isinstance(model, (list, tuple)) and model else model
    if not isinstance(chunk, torch.nn.Module):
        raise not_a_model(model)
    return chunk


def not_a_model(found: object) -> UnsupportedSetup:
    """Return the error for something that is neither a model chunk nor a list of them."""
    return UnsupportedSetup(
        "The model to warm is no model.",
        found=f"{type(found).__name__} {found!r:.80}; expected a torch.nn.Module or a list of model chunks.",
        matters="Without the model's chunks there is nothing to run a local forward and backward of.",
        do="Pass what the schedule gets as model=..., or leave model out to take whatever the schedule is called with.",
    )


def chunks_of(model: Any) -> list[torch.nn.Module]:
    """Return the chunks of what the user passed as model: one module, or several.

    Raises:
        UnsupportedSetup: It is neither.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    if not isinstance(chunks, Iterable) or isinstance(chunks, (str, bytes)):
        raise not_a_model(model)
    chunks = list(chunks)
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.Module):
            raise not_a_model(chunk)
    if not chunks:
        raise not_a_model(model)
    return chunks


def faces_of(model: Any) -> list[torch.nn.Module]:
    """Return every chunk of what the user passed as model, as passed and unwrapped."""
    return [face for chunk in chunks_of(model) for face in (chunk, megatron.unwrapped(chunk))]


def read_call(schedule: Callable[..., Any], keywords: Mapping[str, Any]) -> ScheduleCall:
    """Read one call of a schedule.

    Args:
        schedule: The schedule function, the caller's own or Megatron's.
        keywords: What it is called with.

    Raises:
        UnsupportedSetup: The model has no Megatron config.
    """
    model, data = keywords["model"], keywords["data_iterator"]
    chunks = tuple(model) if isinstance(model, (list, tuple)) else (model,)
    interleaved = len(chunks) > 1 or getattr(schedule, "__name__", "") == megatron.INTERLEAVED
    # A tuple reaches the forward step whole where there is one chunk: it is that caller's own kind of iterator.
    listed = isinstance(data, list) or (interleaved and isinstance(data, tuple))
    iterators = tuple(data) if listed else (data,) * len(chunks)
    return ScheduleCall(
        keywords=keywords,
        chunks=chunks,
        iterators=iterators,
        config=_config_of(chunks[0]),
        groups=megatron.groups_of(keywords),
        interleaved=interleaved,
        random=CallerRandom(),
        schedule=schedule,
    )


def _config_of(chunk: torch.nn.Module) -> Any:
    try:
        return megatron.config_of(chunk)
    except RuntimeError as missing:
        raise UnsupportedSetup(
            "The model to warm has no Megatron config.",
            found=f"{type(chunk).__name__} without .config, wrapped modules included; expected a Megatron model chunk.",
            matters="The config says which activations a stage receives; Megatron's schedule needs it too.",
            do="Pass the chunks that Megatron's model provider built.",
        ) from missing


def refuse_mismatch(call: ScheduleCall) -> None:
    """Raise if the number of iterators does not fit the number of chunks; one stage alone may see it."""
    if len(call.iterators) != len(call.chunks):
        raise UnsupportedSetup(
            "The schedule got another number of data iterators than of model chunks.",
            found=f"{len(call.iterators)} iterators for {len(call.chunks)} chunks; expected one each.",
            matters="The warmup would feed a chunk from the wrong iterator.",
            do="Pass data_iterator as a list with one entry (or None) per model chunk.",
        )


def refuse_impossible(keywords: Mapping[str, Any]) -> None:
    """Raise if no call could be made at all, with a warmup or without."""
    _refuse_incomplete(keywords)
    _refuse_uninitialized(keywords)


def _refuse_incomplete(keywords: Mapping[str, Any]) -> None:
    """Raise if the call lacks what every schedule requires; the cold run would raise too."""
    missing = sorted(megatron.REQUIRED_KEYWORDS - set(keywords))
    if missing:
        raise WrongCall(
            "A pipeline schedule was called without arguments that it requires.",
            found=f"no {', '.join(missing)}; expected {', '.join(sorted(megatron.REQUIRED_KEYWORDS))}.",
            matters="Neither the warmup nor the schedule itself can run without them.",
            do="Pass them by name.",
        )


def _refuse_uninitialized(keywords: Mapping[str, Any]) -> None:
    """Raise if there are no process groups to warm a pipeline in."""
    if not torch.distributed.is_initialized():
        missing, found = "torch.distributed", "no default process group"
    elif keywords.get("p2p_communicator") is None and not megatron.is_initialized():
        missing, found = "Megatron's parallel state", "no model-parallel groups"
    else:
        return
    raise NotInitialized(
        f"{missing} is not initialised.",
        found=f"{found}; expected init_process_group() and Megatron's initialize_model_parallel() before.",
        matters="Without process groups there is no pipeline whose stages could agree on a warmup.",
        do="Initialise both before the schedule is called.",
    )


Guard = Callable[[ScheduleCall], AbstractContextManager[None]]
