"""Empty stand-ins for packages that a trainer imports and that only a GPU could use."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Anything(type):
    """A class whose attributes are such classes too: to be inherited from, or named in an annotation."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Hollow(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - what makes it a package
    __version__ = "2.13.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder:
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        within = any(name == hollow or name.startswith(f"{hollow}.") for hollow in self._names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if within else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Hollow(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


@contextmanager
def hollow(*names: str) -> Iterator[None]:
    """Let *names* and all below them be importable in the block, and unknown after it."""
    finder = _Finder(names)
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Hollow)]:
            del sys.modules[name]


def megatron_without_te() -> None:
    """Import what of Megatron asks for Transformer Engine, while there is none."""
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.transformer.moe.moe_layer  # noqa: F401
