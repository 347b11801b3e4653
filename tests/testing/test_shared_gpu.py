"""Several ranks on one GPU: how they are spread, what NCCL is told, and where it is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from pp_free_warmup.testing import _shared_gpu as shared
from pp_free_warmup.testing._rank_pool import RankPool, run_on_ranks
from pp_free_warmup.testing._shared_gpu import Gpu, Spread

ROOMY = Gpu("Default", 143_771)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch and the driver's tool see one GPU that many processes may use."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(shared, "_gpus", lambda: (ROOMY,))
    return


@pytest.mark.parametrize(("ranks", "gpus", "shared_by"), [(2, 2, 1), (2, 4, 1), (2, 1, 2), (8, 1, 8), (8, 3, 3)])
def test_ranks_spread_evenly(ranks, gpus, shared_by):
    """GPUs differ by at most one rank, the fullest has what results are marked with, and none is left out."""
    spread = Spread(ranks, gpus)
    devices = [spread.device(rank) for rank in range(ranks)]
    loads = [devices.count(gpu) for gpu in range(gpus)]
    assert spread.shared_by == shared_by == max(loads)
    assert max(loads) - min(loads) <= 1


def test_a_gpu_per_rank_changes_nothing():
    """NCCL is told nothing and results bear no mark where no GPU is shared."""
    spread = Spread(4, gpus=4)
    assert (spread.environment(), spread.line(), spread.obstacle()) == ({}, "", "")


def test_sharing_is_said_in_one_line():
    """How many ranks, on how many GPUs."""
    assert Spread(4, gpus=1).line() == "4 ranks share 1 GPU: results are the same, steady steps are slower"
    assert "8 ranks share 3 GPUs, up to 3 on each" in Spread(8, gpus=3).line()


def test_each_rank_claims_a_host_of_its_own(gpus):
    """NCCL sees no GPU twice: the processes of two ranks differ in their host, and in nothing else."""
    pool = RankPool({"CUDA_VISIBLE_DEVICES": "", **shared.rank_environment("cuda", 2)})
    try:
        first, second = run_on_ranks(nccl_environment, 2, pool=pool)
    finally:
        pool.stop()
    assert first == {**shared.NCCL, "NCCL_HOSTID": "host0"}
    assert second == {**shared.NCCL, "NCCL_HOSTID": "host1"}
    assert not shared.NCCL.keys() & os.environ.keys(), "only the ranks may be told so"


def nccl_environment() -> dict[str, str]:
    """Return what this rank's process tells NCCL."""
    return {name: os.environ[name] for name in shared.NCCL}


def test_results_of_shared_gpus_are_marked(gpus):
    """The mark is there on a shared GPU, and nowhere else."""
    assert shared.mark("cuda", 8) == {"gpu_shared_by": 8}
    assert shared.mark("cuda", 1) == {}
    assert shared.mark("cpu", 8) == {}


@pytest.mark.parametrize(
    ("interfaces", "gpu", "said"),
    [
        (["lo", "eth0"], ROOMY, ""),
        (["eth0"], ROOMY, "needs the network interface lo; there are eth0"),
        (["lo"], Gpu("Exclusive_Process", 143_771), "compute mode Exclusive_Process forbids it"),
        (["lo"], Gpu("Default", 1024), "take 2048 MiB on each; it has 1024 MiB"),
    ],
)
def test_what_cannot_be_shared_is_refused(interfaces, gpu, said):
    """The reason names what was found and what is needed."""
    obstacle = shared._why_not_shared(Spread(4, gpus=1), interfaces, [gpu])
    assert (said in obstacle) if said else not obstacle


def test_no_gpu_is_refused_before_a_process_is_started(monkeypatch):
    """Ranks on "cuda" are not even started on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="2 ranks need a GPU; torch sees 0 GPUs"):
        run_on_ranks(nccl_environment, 2, device="cuda")


def test_the_drivers_answer_is_read():
    """A line per GPU; memory that is not told counts as enough."""
    told = "Default, 143771\nExclusive_Process, [N/A]\n"
    assert shared._parsed(told) == [ROOMY, Gpu("Exclusive_Process", 1 << 30)]
