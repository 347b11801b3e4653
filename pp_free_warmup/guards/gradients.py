"""Gradients: ``main_grad`` of Megatron's buffers, and ``grad`` of autograd."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import entries_kept


@contextmanager
def gradients(call: ScheduleCall) -> Iterator[None]:
    """Accumulate the pass's gradients into scratch memory, so that the real ones are never written.

    Zeroing them afterwards would lose gradients accumulated before the call and, where gradients
    share their buffer with MXFP8 parameters, the parameters.

    Changed by: backward: a fused weight gradient and DDP's hooks add to ``main_grad``, autograd to ``grad``.
    Put back by: lending every ``main_grad`` one scratch buffer per dtype and device, as large as the largest.
    Missed by: the first step's gradients; its loss does not show it.
    """
    parameters = list(call.parameters())
    mains = {p: vars(p)["main_grad"] for p in parameters if vars(p).get("main_grad") is not None}
    scratch = _scratch(mains.values())
    with _without_grad(parameters), entries_kept(map(vars, mains), ("main_grad",)):
        for parameter, main in mains.items():
            view = scratch[main.dtype, main.device].as_strided(main.size(), main.stride())
            vars(parameter)["main_grad"] = view
        yield


def _scratch(mains: Iterable[torch.Tensor]) -> dict[tuple[torch.dtype, torch.device], torch.Tensor]:
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for main in mains:
        extent = 1 + sum((size - 1) * step for size, step in zip(main.size(), main.stride(), strict=True))
        sizes[main.dtype, main.device] = max(extent, sizes.get((main.dtype, main.device), 0))
    return {(dtype, device): torch.zeros(n, dtype=dtype, device=device) for (dtype, device), n in sizes.items()}


@contextmanager
def _without_grad(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
