"""Random numbers as a GPU would draw them: from a generator apart from the CPU's.

If "cuda" shared the CPU's default generator, code that saves only one of the
two would look right on a machine without GPU and be wrong on one with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, SupportsIndex, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

# Keeps "cuda" and the CPU apart also after torch.manual_seed(s), which seeds both with s.
SALT = 0x5EED_C0DA

FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace"),
    *("ones", "ones_like", "tensor", "zeros", "zeros_like"),
)
RANDOM_FACTORIES = ("rand", "randint", "randn", "randperm")


class CudaGenerator:
    """Stand in for ``torch.cuda.default_generators[0]``.

    On a real device, ``graphsafe_set_state`` makes the default generator *share* another
    generator's state. Here the default generator draws from that other generator instead,
    which is the same to an onlooker.

    Attributes:
        drawn_from: The ``torch.Generator`` (CPU) that "cuda" draws come from now.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.drawn_from = torch.Generator()
        self._seed = self.drawn_from.initial_seed()
        self.manual_seed(self._seed)

    def get_state(self) -> torch.Tensor:
        """Return a copy of the state's bytes."""
        return self.drawn_from.get_state()

    def set_state(self, state: torch.Tensor) -> CudaGenerator:
        """Write *state* into the generator that is drawn from."""
        self.drawn_from.set_state(state)
        return self

    def manual_seed(self, seed: int) -> CudaGenerator:
        """Seed, but not to the numbers that the CPU draws after the same seed."""
        self._seed = seed
        self.drawn_from.manual_seed(seed ^ SALT)
        return self

    def seed(self) -> int:
        """Seed with a number nobody chose, and return it."""
        self._seed = self.drawn_from.seed()
        return self._seed

    def initial_seed(self) -> int:
        """Return the seed last set."""
        return self._seed

    def clone_state(self) -> torch.Generator:
        """Return a generator of its own with this one's state."""
        return self.drawn_from.clone_state()

    def graphsafe_get_state(self) -> torch.Generator:
        """Return the live generator: what is drawn later shows in it."""
        return self.drawn_from

    def graphsafe_set_state(self, state: torch.Generator) -> CudaGenerator:
        """Draw from *state* from now on, and so move it."""
        self.drawn_from = state
        return self


class OneGenerator(tuple[CudaGenerator, ...]):
    """Stand in for ``torch.cuda.default_generators`` on a machine with one "device".

    Whatever names a device (an index, or the ``torch.device("cpu")`` that stands for
    ``torch.cuda.current_device()``) leads to the one generator.
    """

    __slots__ = ()

    def __getitem__(self, device: SupportsIndex | slice | torch.device) -> Any:
        """Return the one generator, or what a slice of the tuple holds."""
        return super().__getitem__(device if isinstance(device, slice) else 0)


def on_cpu(factory: F) -> F:
    """Wrap a tensor factory so that ``device="cuda"`` gives a CPU tensor, and pinned memory is plain memory."""

    @functools.wraps(factory)
    def made(*args: Any, **keywords: Any) -> Any:
        keywords.pop("pin_memory", None)
        if _is_cuda(keywords.get("device")):
            keywords["device"] = "cpu"
        return factory(*args, **keywords)

    return cast(F, made)


def drawn_on_cuda(factory: F, cuda: CudaGenerator) -> F:
    """Wrap a random factory so that with ``device="cuda"`` it draws from the "cuda" generator."""

    @functools.wraps(factory)
    def made(*args: Any, **keywords: Any) -> Any:
        if _is_cuda(keywords.get("device")):
            keywords["device"] = "cpu"
            # Inductor cannot trace an explicit generator; there the CPU's is drawn from.
            if keywords.get("generator") is None and not torch.compiler.is_compiling():
                keywords["generator"] = cuda.drawn_from
        return factory(*args, **keywords)

    return cast(F, made)


def dropout_on_cuda(dropout: F, cuda: CudaGenerator) -> F:
    """Wrap ``torch.nn.functional.dropout`` so that eager masks come from the "cuda" generator.

    Compiled code keeps torch's own dropout, and so draws from the CPU's generator: Inductor
    has no dropout that takes a generator.
    """

    @functools.wraps(dropout)
    def dropped(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        # A tensor of another type stands for a traced one: torch.compile calls functions by name then.
        traced = torch.compiler.is_compiling() or type(input) not in (torch.Tensor, torch.nn.Parameter)
        if traced or not training or not 0.0 < p < 1.0:
            return cast(torch.Tensor, dropout(input, p, training, inplace))
        kept = torch.empty_like(input, requires_grad=False).bernoulli_(1.0 - p, generator=cuda.drawn_from)
        kept.div_(1.0 - p)
        return input.mul_(kept) if inplace else input * kept

    return cast(F, dropped)


def normal_on_cuda(normal: F, cuda: CudaGenerator) -> F:
    """Wrap ``torch.nn.init.normal_``: Megatron initialises weights on the device, inside its tracker."""

    @functools.wraps(normal)
    def filled(
        tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        return cast(torch.Tensor, normal(tensor, mean, std, generator or cuda.drawn_from))

    return cast(F, filled)


def _is_cuda(device: Any) -> bool:
    """Tell whether *device*, in any form torch takes, means a GPU."""
    if device is None:
        return False
    return isinstance(device, int) or torch.device(device).type == "cuda"
