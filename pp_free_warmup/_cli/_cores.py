"""How many cores this process may use, whatever the machine has and ``OMP_NUM_THREADS`` says."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores_usable() -> int:
    """Return the cores that the kernel lets this process use: its affinity, and its cgroups' quotas."""
    quotas = (math.ceil(quota) for quota in _quotas(CGROUPS, OWN))
    return max(1, min((len(os.sched_getaffinity(0)), *quotas)))


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """Yield, in cores, the quotas of the cgroups that *own* names and of those above them (version 2 and 1)."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(top):
                yield from _quota(place)


def _quota(cgroup: Path) -> Iterator[float]:
    """Yield what a cgroup allows; nothing if it sets no quota, or is not there, as in a container of its own."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((cgroup / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)
