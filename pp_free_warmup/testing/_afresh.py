"""Let a process start over: take down what a run of Megatron leaves in module globals."""

from __future__ import annotations

import gc
import sys


def forget_megatron() -> None:
    """Take down Megatron's groups, random states, sums for the log and singletons."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    from pp_free_warmup._megatron import loss_scales, loss_trackers

    parallel_state.destroy_model_parallel()
    random._CUDA_RNG_STATE_TRACKER = None
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    for owner, name, empty in loss_trackers():  # as long as the model that filled them first has layers
        setattr(owner, name, empty)
    for owner, name, _ in loss_scales(()):
        setattr(owner, name, None)
    for name in ("num_microbatches_calculator", "rerun_state_machine"):
        module = sys.modules.get(f"megatron.core.{name}")
        forget = getattr(module, f"destroy_{name}", None)
        if forget is not None:
            forget()


def let_models_die() -> None:
    """Empty all of Megatron's data-parallel wrappers, which nobody must use any more.

    With overlap their hooks on AccumulateGrad nodes refer to them through C++, where no collector
    sees the circle: they would stay for good, and with them their groups and the groups' threads.
    """
    from megatron.core.distributed import DistributedDataParallel

    for wrapper in gc.get_objects():
        if isinstance(wrapper, DistributedDataParallel):
            vars(wrapper).clear()
