"""Transformer Engine's FP8 state in its three layouts, for machines that it cannot run on.

Only what a delayed-scaling forward and backward do to state is here, under the names and in the
places of Transformer Engine 2.2, 2.13 and 2.20 (`pytorch/fp8.py`, `pytorch/quantization.py`,
`pytorch/module/base.py`, `pytorch/ops/op.py`, `pytorch/distributed.py`). The GPU tests run the real one.
"""

from __future__ import annotations

import sys
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

HISTORY = 4
FP8 = "transformer_engine.pytorch.fp8"
QUANTIZATION = "transformer_engine.pytorch.quantization"
DISTRIBUTED = "transformer_engine.pytorch.distributed"


@dataclass(slots=True)
class FP8GlobalState:
    """The manager's state from 2.15 on."""

    fp8_enabled: bool = False
    is_first_fp8_module: bool = False
    autocast_depth: int = 0
    global_amax_buffer: dict[str, list] = field(default_factory=dict)
    global_amax_history_buffer: dict[str, list] = field(default_factory=dict)
    global_scale_buffer: dict[str, list] = field(default_factory=dict)
    fp8_tensors_recompute_buffer: list = field(default_factory=list)
    autocast_arguments: dict[Any, tuple] = field(default_factory=dict)
    skip_fp8_weight_update_tensor: torch.Tensor | None = None


def _reset(cls):
    """Stand for the methods of the manager's class."""


def layout(version):
    """Return the modules of that version: their names, and the one manager that they know."""
    names = {name: getattr(FP8GlobalState(), name) for name in FP8GlobalState.__slots__}
    if version >= (2, 15):
        names = {"quantization_state": FP8GlobalState()}
    else:
        names["FP8_ENABLED"] = names.pop("fp8_enabled")
        names["IS_FIRST_FP8_MODULE"] = names.pop("is_first_fp8_module")
        names["AUTOCAST_DEPTH" if version >= (2, 9) else "FP8_AUTOCAST_DEPTH"] = names.pop("autocast_depth")
    manager = type("FP8GlobalStateManager", (), {**names, "reset": classmethod(_reset)})
    distributed = SimpleNamespace(
        _USE_REENTRANT_ACTIVATION_RECOMPUTE=True,
        _IN_ACTIVATION_RECOMPUTE_REGION=False,
        _ACTIVATION_RECOMPUTE_PHASE=False,
        activation_recompute_forward=type("activation_recompute_forward", (), {"_is_first_fp8_module": []}),
    )
    contents = {FP8: {"FP8GlobalStateManager": manager}, DISTRIBUTED: vars(distributed)}
    if version >= (2, 9):
        contents[QUANTIZATION] = {"FP8GlobalStateManager": manager}
    return contents


@contextmanager
def loaded(version):
    """Let that version be what the process has imported; yield the manager's class."""
    contents = layout(version)
    absent = {name: sys.modules.get(name) for name in (FP8, QUANTIZATION, DISTRIBUTED)}
    for name in absent:
        sys.modules.pop(name, None)
    for name, values in contents.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(values)
    try:
        yield contents[FP8]["FP8GlobalStateManager"]
    finally:
        for name, module in absent.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def state_of(manager):
    """Return what holds the state: the class itself up to 2.14."""
    return getattr(manager, "quantization_state", manager)


class Quantizer:
    """Points into a recipe state's scale and newest amax."""

    def __init__(self, scale, amax):
        self.scale, self.amax, self.columnwise_usage = scale, amax, True


class DelayedScalingRecipeState:
    """Scales and amax history of one direction."""

    def __init__(self, mode, count):
        self.mode = mode
        self.scale = torch.ones(count)
        self.amax_history = torch.zeros(HISTORY, count)

    def make_quantizers(self):
        return [Quantizer(self.scale[i], self.amax_history[0][i]) for i in range(len(self.scale))]


class Layer(torch.nn.Module):
    """A layer as `TransformerEngineBaseModule` makes it, before its first forward."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 2))
        self.fp8_initialized = False
        self.fp8_meta = {"fp8_checkpoint": False, "fp8_group": None}
        self.fp8_meta_tensors_initialized = False
        self.quantizers = {"scaling_fwd": [], "scaling_bwd": []}
        self._fp8_workspaces = {}
        self.activation_dtype = None
        self.is_first_microbatch = True

    def forward(self, inp, manager):
        if not self.fp8_initialized:
            for key, count in (("scaling_fwd", 3), ("scaling_bwd", 2)):
                self.fp8_meta[key] = DelayedScalingRecipeState(key, count)
                self.quantizers[key] = self.fp8_meta[key].make_quantizers()
            self.fp8_initialized = self.fp8_meta_tensors_initialized = True
            self.forwarded_at_least_once = True
        register(manager, self.fp8_meta, ("scaling_fwd", "scaling_bwd"))
        self.activation_dtype = inp.dtype
        self._fp8_workspaces["weight"] = self.weight.detach() * self.fp8_meta["scaling_fwd"].scale[1]
        self.fp8_meta["scaling_fwd"].amax_history[0] = inp.detach().abs().max()
        self.fp8_meta["scaling_bwd"].amax_history[0] = self.fp8_meta["scaling_bwd"].amax_history[0] + 1
        self.quantizers["scaling_fwd"][0].columnwise_usage = not self.quantizers["scaling_fwd"][0].columnwise_usage
        self.is_first_microbatch = False
        return inp * self.fp8_meta["scaling_fwd"].scale[0]


class Operation(torch.nn.Module):
    """An operation of the op fuser as `BasicOperation` makes it."""

    def __init__(self):
        super().__init__()
        self._fp8_metas = None
        self._quantizers = None

    def forward(self, inp, manager):
        if self._fp8_metas is None:
            states = {mode: DelayedScalingRecipeState(mode, 1) for mode in ("forward", "backward")}
            keys = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
            self._fp8_metas = {mode: {keys[mode]: state} for mode, state in states.items()}
            self._quantizers = {mode: state.make_quantizers() for mode, state in states.items()}
        for mode, key in (("forward", "scaling_fwd"), ("backward", "scaling_bwd")):
            register(manager, self._fp8_metas[mode], (key,))
            self._fp8_metas[mode][key].amax_history[0] = inp.detach().abs().max()
        return inp


def register(manager, meta, keys):
    """Append a module's scales to the manager's lists, once, and note their place."""
    state = state_of(manager)
    if "buffer_index_and_autocast_key" in meta:
        return
    meta["buffer_index_and_autocast_key"] = []
    for key in keys:
        buffer = f"{'forward' if key == 'scaling_fwd' else 'backward'}_recipe"
        state.global_amax_buffer.setdefault(buffer, []).append(meta[key].amax_history[0])
        state.global_amax_history_buffer.setdefault(buffer, []).append(meta[key].amax_history)
        state.global_scale_buffer.setdefault(buffer, []).append(meta[key].scale)
        meta["buffer_index_and_autocast_key"] += [len(state.global_amax_buffer[buffer]) - 1, buffer]


def autocast(manager, modules, inp):
    """Run *modules* in an autocast region, as one forward and backward would."""
    state = state_of(manager)
    depth = next(name for name in ("FP8_AUTOCAST_DEPTH", "AUTOCAST_DEPTH", "autocast_depth") if hasattr(state, name))
    first = next(name for name in ("IS_FIRST_FP8_MODULE", "is_first_fp8_module") if hasattr(state, name))
    state.autocast_arguments[f"recipe {len(state.autocast_arguments)}"] = ("recipe", None)
    setattr(state, first, not getattr(state, first))
    setattr(state, depth, getattr(state, depth) + 1)
    for module in modules:
        inp = module(inp, manager)
    state.fp8_tensors_recompute_buffer.append(deque([[inp.detach()]]))
    if state.skip_fp8_weight_update_tensor is not None:
        state.skip_fp8_weight_update_tensor += 1
    setattr(state, depth, getattr(state, depth) - 1)
    roll(state)
    return inp


def roll(state):
    """Reduce and update: every history of every registered module moves on by one."""
    for histories, scales in zip(
        state.global_amax_history_buffer.values(), state.global_scale_buffer.values(), strict=True
    ):
        for history, scale in zip(histories, scales, strict=True):
            scale.copy_(448 / history.amax(0).clamp(min=1))
            history.copy_(history.roll(-1, 0))
            history[0].zero_()
