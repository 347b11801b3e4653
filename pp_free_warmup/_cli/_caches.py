"""Where compilers keep what they have compiled, and on what kind of file system; imports none of them."""

from __future__ import annotations

import getpass
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

NETWORK = frozenset(
    [
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "cifs",
        "smb3",
        "afs",
        "glusterfs",
        "9p",
        "virtiofs",
        "wekafs",
        "panfs",
        "daosfs",
        "pvfs2",
        "orangefs",
    ]
)
# Layers and user-space file systems say nothing about where the data is.
OPAQUE = frozenset({"overlay"})
PATIENCE_S = 2.0


def cache_places(environment: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Return the name and directory of each compile cache, as *environment* and the libraries' defaults set it."""
    temporary, home, user = tempfile.gettempdir(), str(Path.home()), getpass.getuser()
    xdg = environment.get("XDG_CACHE_HOME", f"{home}/.cache")
    defaults = {
        "Inductor": ("TORCHINDUCTOR_CACHE_DIR", f"{temporary}/torchinductor_{user}"),
        "Triton": ("TRITON_CACHE_DIR", f"{environment.get('TRITON_HOME', home)}/.triton/cache"),
        "torch extensions": ("TORCH_EXTENSIONS_DIR", f"{xdg}/torch_extensions"),
        "CUDA driver": ("CUDA_CACHE_PATH", f"{home}/.nv/ComputeCache"),
        "DeepGEMM": ("DG_JIT_CACHE_DIR", f"{home}/.deep_gemm"),
        "TileLang": ("TILELANG_CACHE_DIR", f"{home}/.tilelang/cache"),
    }
    return [(name, environment.get(variable, default)) for name, (variable, default) in defaults.items()]


def file_system(directory: str, mounts: str | None = None, patience: float = PATIENCE_S) -> str:
    """Say on what file system *directory* lies, or will lie once it is made.

    Asks in a thread of its own: a network file system whose server is gone answers nothing.

    Args:
        directory: The directory; it need not exist.
        mounts: The text of ``/proc/self/mountinfo``; None reads it.
        patience: Seconds to wait for an answer.

    Returns:
        ``"local (ext4)"``, ``"network (nfs4)"``, ``"unknown (overlay)"`` or that it does not answer.
    """
    table = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(_kind(_existing(directory), table)), daemon=True)
    asking.start()
    asking.join(patience)
    return answers[0] if answers else f"does not answer within {patience:g} s"


def _existing(directory: str) -> str:
    """Return the real path of *directory*, or of the first of its parents that exists."""
    path = Path(directory).expanduser().resolve()
    return str(next(place for place in (path, *path.parents) if place.exists()))


def _kind(path: str, mounts: str) -> str:
    """Find the longest mount point that holds *path*; of two equal ones the later is on top."""
    best, kind = -1, "?"
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= best:
            best, kind = len(point), right.split()[0]
    where = "network" if kind in NETWORK else "unknown" if kind in OPAQUE or kind.startswith("fuse") else "local"
    return f"{where} ({kind})"
