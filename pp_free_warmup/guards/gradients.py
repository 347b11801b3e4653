"""Gradients: ``main_grad`` of Megatron's buffers, and ``grad`` of autograd."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import entries_kept

Layout = tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]


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
    owners = [vars(p) for p in parameters if vars(p).get("main_grad") is not None]
    layouts = [_layout(owner["main_grad"]) for owner in owners]
    scratch = _scratch(set(layouts))
    with _without_grad(parameters), entries_kept(owners, ("main_grad",)):
        for owner, layout in zip(owners, layouts, strict=True):
            owner["main_grad"] = scratch[layout]
        yield


def _layout(main: torch.Tensor) -> Layout:
    return main.dtype, main.device, main.size(), main.stride()


def _scratch(layouts: Collection[Layout]) -> dict[Layout, torch.Tensor]:
    """Return a view for each layout; those of one dtype and device share a buffer, as large as the largest."""
    extents: dict[tuple[torch.dtype, torch.device], int] = {}
    for dtype, device, size, stride in layouts:
        extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        extents[dtype, device] = max(extent, extents.get((dtype, device), 0))
    buffers = {(dtype, device): torch.zeros(n, dtype=dtype, device=device) for (dtype, device), n in extents.items()}
    return {layout: buffers[layout[:2]].as_strided(*layout[2:]) for layout in layouts}


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
