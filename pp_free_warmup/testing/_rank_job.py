"""What the test process and its rank processes say to each other."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

BODY = "__body_on_ranks__"


@dataclass(frozen=True)
class Where:
    """Where a function is found again in another process.

    Attributes:
        module: The module's name.
        file: The module's file, used where the name alone does not lead to it.
        qualname: The path of names inside the module.
    """

    module: str
    file: str
    qualname: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Where:
        """Describe *function*, which must be reachable by name in its module.

        Raises:
            TypeError: It is defined inside another function, or is a lambda.
        """
        if "<" in function.__qualname__:
            raise TypeError(
                f"{function.__qualname__} cannot run on ranks: it has no name in its module to import it by"
            )
        return cls(function.__module__, inspect.getfile(function), function.__qualname__)

    def find(self) -> Callable[..., Any]:
        """Import the module and return the function, without what decorates it for the ranks."""
        found: Any = self._module()
        for name in self.qualname.split("."):
            found = getattr(found, name)
        body: Callable[..., Any] = getattr(found, BODY, found)
        return body

    def _module(self) -> Any:
        """Import by name; where that fails (pytest's importlib mode), by file."""
        if self.module in sys.modules:
            return sys.modules[self.module]
        if importlib.util.find_spec(self.module.split(".")[0]) is not None:
            return importlib.import_module(self.module)
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        spec.loader.exec_module(module)
        return module


@dataclass(frozen=True)
class Job:
    """One function to run on one rank.

    Attributes:
        where: The function.
        arguments: Its positional arguments, picklable.
        keywords: Its keyword arguments, picklable.
        rank: This process's rank.
        world_size: How many ranks take part.
        store: Host and port of the TCP store that the test process keeps.
        prefix: What sets this job's keys in the store apart.
        timeout: Seconds after which the test process ends the ranks.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL).
        jit: Whether Megatron's fused functions are compiled, see `cuda_on_cpu`.
        path: The test process's ``sys.path``.
    """

    where: Where
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    rank: int
    world_size: int
    store: tuple[str, int]
    prefix: str
    timeout: float
    device: str = "cpu"
    jit: bool = False
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))


@dataclass(frozen=True)
class Outcome:
    """How a job ended on one rank.

    Attributes:
        kind: ``"returned"``, ``"raised"`` or ``"skipped"``.
        value: What was returned.
        text: The traceback, or the reason for skipping.
    """

    kind: Literal["returned", "raised", "skipped"]
    value: Any = None
    text: str = ""
