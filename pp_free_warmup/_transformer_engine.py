"""The one door to Transformer Engine: where it keeps FP8 state outside its modules.

It is never imported here. A model with one of its layers has imported it already, and without such
a layer nothing of it can change, so a process that has not loaded it simply has nothing to yield.

Its manager of FP8 state has always had the same name, but three layouts: class attributes in `fp8` (up
to 2.8), class attributes in `quantization` (2.9 to 2.14), and there a dataclass with slots in the
manager's ``quantization_state`` (2.15 on).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

import torch

HOMES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")
DISTRIBUTED = "transformer_engine.pytorch.distributed"
Modules = Iterable[torch.nn.Module]


def fp8_manager_fields() -> Iterator[tuple[type, tuple[str, ...]]]:
    """Yield the manager of FP8 state and the names of its data: all of it up to 2.14, then one object."""
    manager = _fp8_manager()
    if manager is not None:
        yield manager, tuple(name for name, value in vars(manager).items() if _is_data(name, value))


def fp8_layers(modules: Modules) -> list[torch.nn.Module]:
    """Return layers (``fp8_meta``) and operations of the op fuser (``_fp8_metas``), those without scales yet too."""
    return [module for module in modules if "fp8_meta" in vars(module) or "_fp8_metas" in vars(module)]


def fp8_values(layers: Modules) -> list[torch.Tensor]:
    """Return the tensors that a forward or backward changes in place, each once.

    Scales and amax histories: those of *layers*, and those of every module that ever registered with
    the manager, another model's too, since leaving an autocast region rolls them all. And the flag
    on the device by which CUDA graphs skip the update of the weights.
    """
    manager = _fp8_manager()
    state = getattr(manager, "quantization_state", manager)
    recipes = [recipe for layer in layers for recipe in _recipe_states(layer)]
    found = [getattr(recipe, name, None) for recipe in recipes for name in ("scale", "scale_inv", "amax_history")]
    for name in ("amax", "amax_history", "scale", "scale_inv"):
        for registered in getattr(state, f"global_{name}_buffer", {}).values():
            found.extend(registered)
    found.append(getattr(state, "skip_fp8_weight_update_tensor", None))
    return list({id(value): value for value in found if isinstance(value, torch.Tensor)}.values())


def recompute_flags() -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yield the flags that say which phase of activation recomputation runs; an exception leaves them up."""
    distributed = sys.modules.get(DISTRIBUTED)
    names = ("_USE_REENTRANT_ACTIVATION_RECOMPUTE", "_IN_ACTIVATION_RECOMPUTE_REGION", "_ACTIVATION_RECOMPUTE_PHASE")
    if distributed is not None:
        yield distributed, tuple(name for name in names if hasattr(distributed, name))


def recompute_queue() -> object:
    """Return the list in which regions to be recomputed note whether they held the first FP8 module, or None."""
    region = getattr(sys.modules.get(DISTRIBUTED), "activation_recompute_forward", None)
    return getattr(region, "_is_first_fp8_module", None)


def _fp8_manager() -> Any:
    found = (getattr(sys.modules.get(home), "FP8GlobalStateManager", None) for home in HOMES)
    return next((manager for manager in found if manager is not None), None)


def _is_data(name: str, value: object) -> bool:
    return not name.startswith("__") and not isinstance(value, (FunctionType, classmethod, staticmethod, property))


def _recipe_states(module: torch.nn.Module) -> Iterator[Any]:
    metas = [vars(module).get("fp8_meta"), *(vars(module).get("_fp8_metas") or {}).values()]
    for meta in metas:
        for key in ("scaling_fwd", "scaling_bwd"):
            state = (meta or {}).get(key)
            yield from (part for part in (state, getattr(state, "_ds_state", None)) if part is not None)
