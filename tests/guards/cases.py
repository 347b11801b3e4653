"""One case per guard, or several: what it keeps, and what a pass would do to that."""

from __future__ import annotations

import random

import numpy as np
import torch
from case import Case, Same, call_of
from megatron.core.tensor_parallel import random as megatron_random

from pp_free_warmup import guards
from pp_free_warmup.testing import cuda_on_cpu


def _rng_call(stack):
    """Make a call in a process whose Megatron tracker exists."""
    stack.enter_context(cuda_on_cpu())
    stack.enter_context(_tracker_of_its_own())
    megatron_random.initialize_rng_tracker()
    return call_of(torch.nn.Linear(1, 1))


CASES = ()
