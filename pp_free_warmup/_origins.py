"""Whose code a module is: the user's own and Megatron's is looked into, anybody else's is not."""

from __future__ import annotations

import sys
from collections.abc import Iterable

LIBRARIES = ("megatron", "transformer_engine")
# Never looked into, wherever they are installed; the testing package's trainings are a trainer's own objects.
NOT_LOOKED_AT = ("torch", "triton", "numpy", "wrapt", "pp_free_warmup")
LOOKED_AT = ("pp_free_warmup.testing", "torch.optim")
MOST_FILES = 300


class Origins:
    """Tell which modules are looked into, and remember which files the code met is from.

    Args:
        homes: Installed packages or modules that are looked into like the user's own.

    Attributes:
        files: Names of modules outside the libraries, in the order added, `MOST_FILES` at most.
    """

    def __init__(self, homes: Iterable[str] = ()) -> None:
        self.files: dict[str, None] = {}
        self._homes = frozenset(homes)
        self._known: dict[str, bool] = {}

    def looks_into(self, module: str) -> bool:
        """Tell whether a module's objects and globals are looked into.

        Those of libraries that are installed are not, unless the model or the forward step is from there.
        """
        if module not in self._known:
            self._known[module] = self._is_looked_into(module)
        return self._known[module]

    def add_file(self, name: str) -> None:
        """Remember a module whose globals are to be visited; those of the libraries all are."""
        outside = name.partition(".")[0] not in (*LIBRARIES, *NOT_LOOKED_AT)
        if outside and len(self.files) < MOST_FILES and self.looks_into(name):
            self.files.setdefault(name)

    def _is_looked_into(self, module: str) -> bool:
        package = module.partition(".")[0]
        if package in LIBRARIES or _is_within(module, LOOKED_AT):
            return True
        if package in NOT_LOOKED_AT or package in sys.stdlib_module_names:
            return False
        file = str(vars(sys.modules[module]).get("__file__")) if module in sys.modules else ""
        return "-packages" not in file or _is_within(module, self._homes)


def _is_within(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
