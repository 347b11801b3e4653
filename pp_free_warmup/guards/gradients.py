"""Gradients of parameters, accumulated ones included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pp_free_warmup._call import ScheduleCall

LARGE = 64 * 2**20  # bytes; for more, a look at the values costs less than as much memory again


@contextmanager
def gradients(call: ScheduleCall) -> Iterator[None]:
    """Accumulate the pass's gradients where the real ones are not, so that those are never lost.

    Zeroing them all afterwards would lose gradients accumulated before the call and, where gradients
    share their buffer with MXFP8 parameters, the parameters. A large one whose every bit is zero may
    be written, since zeroing is then to put back: a vocabulary of 129 000 rows needs no second copy.

    Changed by: backward: a fused weight gradient and DDP's hooks add to ``main_grad``, autograd to ``grad``.
    Put back by: lending every other ``main_grad`` one scratch buffer per dtype and device, as large as the largest.
    Missed by: the first step's gradients; its loss does not show it.
    """
    grads = [(parameter, parameter.grad) for parameter in call.parameters()]
    mains = [(vars(one), vars(one)["main_grad"]) for one, _ in grads if vars(one).get("main_grad") is not None]
    zeros = {id(main): main for _, main in mains if _is_large_and_zero(main)}
    views, call.taken["gradients"] = _scratch([main for _, main in mains if id(main) not in zeros])
    try:
        for parameter, _ in grads:
            parameter.grad = None
        for fields, main in mains:
            fields["main_grad"] = views.get(id(main), main)
        yield
    finally:
        for fields, main in mains:
            fields["main_grad"] = main
        for parameter, grad in grads:
            parameter.grad = grad
        for zero in zeros.values():
            zero.detach().zero_()


def _is_large_and_zero(gradient: torch.Tensor) -> bool:
    large = gradient.nbytes > LARGE and gradient.is_contiguous()
    return large and not bool(gradient.detach().view(torch.uint8).any())


def _scratch(mains: list[torch.Tensor]) -> tuple[dict[int, torch.Tensor], int]:
    """Return a view per gradient, by its id, and their bytes: one buffer per dtype and device, as large as needed."""
    extents: dict[tuple[torch.dtype, torch.device], int] = {}
    for main in mains:
        extent = 1 + sum((n - 1) * step for n, step in zip(main.size(), main.stride(), strict=True))
        extents[main.dtype, main.device] = max(extent, extents.get((main.dtype, main.device), 0))
    buffers = {(dtype, device): torch.zeros(n, dtype=dtype, device=device) for (dtype, device), n in extents.items()}
    views = {id(main): buffers[main.dtype, main.device].as_strided(main.size(), main.stride()) for main in mains}
    return views, sum(buffer.nbytes for buffer in buffers.values())
