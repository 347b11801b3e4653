"""The cores that a process may use, from its affinity and from files as the kernel writes them."""

from __future__ import annotations

import os

import pytest

from pp_free_warmup._cli import _cores as cores


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """Return a function that writes cgroup files; the process then is in ``/job/step``, and may use 16 cores."""
    own = tmp_path / "own"
    own.write_text("4:memory:/elsewhere\n2:cpu,cpuacct:/job/step\n0::/job/step\n")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    monkeypatch.setattr(cores, "OWN", own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    def write(name: str, text: str) -> None:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return write


def test_affinity_counts(cgroup, monkeypatch):
    """Without a quota, the affinity says it all; thread settings say nothing."""
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    cgroup("job/step/cpu.max", "max 100000\n")
    cgroup("cpu/job/step/cpu.cfs_quota_us", "-1\n")
    cgroup("cpu/job/step/cpu.cfs_period_us", "100000\n")
    assert cores.cores_usable() == 16


@pytest.mark.parametrize("folder", ["", "job/", "job/step/"])
def test_the_least_quota_counts(cgroup, folder):
    """A quota binds on the process's own cgroup and on every one above it, and a part of a core counts as one."""
    cgroup(f"{folder}cpu.max", "350000 100000\n")
    assert cores.cores_usable() == 4


def test_a_quota_of_version_1_counts(cgroup):
    """The older files say the same in two."""
    cgroup("cpu/cpu.cfs_quota_us", "200000\n")
    cgroup("cpu/cpu.cfs_period_us", "100000\n")
    assert cores.cores_usable() == 2


def test_no_cgroups_leave_the_affinity(cgroup, monkeypatch, tmp_path):
    """Where the kernel shows no cgroups, nothing is lost."""
    monkeypatch.setattr(cores, "OWN", tmp_path / "absent")
    assert cores.cores_usable() == 16
