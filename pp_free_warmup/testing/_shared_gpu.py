"""How ranks are spread over GPUs, and what NCCL needs where several ranks share one.

NCCL refuses two ranks on one device because it sees one bus id twice on one host. Ranks that
each claim a host of their own (``NCCL_HOSTID``) are taken for neighbours on a network, and talk
through sockets. Everything but speed is then as on a GPU each: kernels, order of messages, bits.
"""

from __future__ import annotations

import functools
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

LOOPBACK = "lo"
# One host per rank, hence sockets; nothing that would look for what hosts or NVLink domains share.
NCCL = {
    "NCCL_HOSTID": "host{rank}",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": LOOPBACK,
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}
CONTEXT_MIB = 512  # what a process takes on a GPU before it has a tensor there


class Gpu(NamedTuple):
    """What the driver's tool says of a GPU: which processes it lets in, and its memory."""

    mode: str
    mib: int


@dataclass(frozen=True)
class Spread:
    """Ranks on the GPUs of this machine: one each while there are enough, then in turn.

    Attributes:
        ranks: How many processes.
        gpus: How many GPUs torch sees.

    Example:
        >>> [Spread(4, gpus=2).device(rank) for rank in range(4)]
        [0, 1, 0, 1]
    """

    ranks: int
    gpus: int

    @property
    def shared_by(self) -> int:
        """The most ranks that one GPU has; 1 if none is shared."""
        return max(1, -(-self.ranks // max(1, self.gpus)))

    def device(self, rank: int) -> int:
        """Return the index of the rank's GPU."""
        return rank % self.gpus

    def environment(self) -> dict[str, str]:
        """Return what the rank processes need; ``{rank}`` stands for a rank's own number."""
        return dict(NCCL) if self.shared_by > 1 else {}

    def line(self) -> str:
        """Say that GPUs are shared; empty if none is."""
        if self.shared_by == 1:
            return ""
        gpus = "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs, up to {self.shared_by} on each"
        return f"{self.ranks} ranks share {gpus}: results are the same, steady steps are slower"

    def obstacle(self) -> str:
        """Say why these ranks cannot run here; empty if they can."""
        if self.gpus < 1:
            return f"{self.ranks} ranks need a GPU; torch sees 0 GPUs"
        if self.shared_by == 1:
            return ""
        return _why_not_shared(self, [name for _, name in socket.if_nameindex()], _gpus())


def spread(ranks: int) -> Spread:
    """Spread *ranks* over the GPUs that torch sees, without taking memory on any."""
    import torch

    return Spread(ranks, torch.cuda.device_count())


def mark(device: str, ranks: int) -> dict[str, int]:
    """Return what results must carry, so that nobody takes those of shared GPUs for those of a GPU per rank."""
    shared_by = spread(ranks).shared_by if device == "cuda" else 1
    return {"gpu_shared_by": shared_by} if shared_by > 1 else {}


def rank_environment(device: str, ranks: int) -> dict[str, str]:
    """Return what rank processes need in their environment; ``{rank}`` stands for a rank's own number.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        ranks: How many processes.

    Raises:
        RuntimeError: They cannot run on this machine's GPUs.
    """
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    wanted = spread(ranks)
    if wanted.obstacle():
        raise RuntimeError(wanted.obstacle())
    return wanted.environment()


def _why_not_shared(wanted: Spread, interfaces: Sequence[str], gpus: Sequence[Gpu]) -> str:
    """Say what this machine lacks for shared GPUs; empty if nothing."""
    few = f"{wanted.ranks} ranks must share {wanted.gpus} GPU{'s' if wanted.gpus > 1 else ''}"
    needed = wanted.shared_by * CONTEXT_MIB
    if LOOPBACK not in interfaces:
        return f"{few}: NCCL then needs the network interface {LOOPBACK}; there are {', '.join(interfaces) or 'none'}"
    for gpu in gpus:
        if gpu.mode != "Default":
            return f"{few}: compute mode {gpu.mode} forbids it; Default allows it (nvidia-smi -c DEFAULT)"
        if gpu.mib < needed:
            return f"{few}: the processes alone take {needed} MiB on each; it has {gpu.mib} MiB"
    return ""


@functools.cache
def _gpus() -> tuple[Gpu, ...]:
    """Ask the driver's own tool, which takes no memory on a GPU; empty if it is not there."""
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", "--query-gpu=compute_mode,memory.total", "--format=csv,noheader,nounits"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return tuple(_parsed(told.stdout)) if told.returncode == 0 else ()


def _parsed(told: str) -> list[Gpu]:
    """Read the tool's answer, a line per GPU; memory that it does not know counts as enough."""
    rows = (line.split(", ") for line in told.splitlines() if ", " in line)
    return [Gpu(mode, int(mib) if mib.isdecimal() else 1 << 30) for mode, mib in rows]
