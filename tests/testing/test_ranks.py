"""Test bodies run on several processes, and their failures are told."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pp_free_warmup.testing import RanksFailed, ranks, run_on_ranks

ROOT = Path(__file__).resolve().parents[2]


@ranks(2)
def test_ranks_form_one_world() -> None:
    """Every rank takes part in a collective of the whole world."""
    total = torch.ones(1)
    dist.all_reduce(total)

    assert total == 2


@pytest.mark.parametrize("size", [1, 2])
@ranks(2)
def test_arguments_reach_the_body(size: int, tmp_path: Path) -> None:
    """Parametrised values and fixtures that can be pickled are passed on to every rank."""
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()

    assert size in (1, 2)
    assert len(list(tmp_path.iterdir())) == 2


def _patched(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("PATCHED_ON_A_RANK", "1")
    monkeypatch.setattr(sys, "patched_on_a_rank", True, raising=False)
    return os.getpid()


def _is_patched() -> tuple[int, bool]:
    return os.getpid(), "PATCHED_ON_A_RANK" in os.environ or hasattr(sys, "patched_on_a_rank")


def test_what_a_test_patches_on_a_rank_is_undone_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next test in the same processes finds nothing of it."""
    patched = run_on_ranks(_patched, 2, monkeypatch)

    assert run_on_ranks(_is_patched, 2) == [(process, False) for process in patched]


class TestInAClass:
    """Methods find their way to the ranks as well."""

    @ranks(2)
    def test_method_runs(self) -> None:
        """The instance is passed on like any argument."""
        assert dist.get_world_size() == 2


@ranks(2)
def test_every_rank_may_skip() -> None:
    """A skip on all ranks is a skip."""
    pytest.skip("told to")


def _pid() -> int:
    return os.getpid()


def _world() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads()


def test_values_come_back_in_rank_order() -> None:
    """Each rank's value is returned; smaller worlds reuse the larger one's processes."""
    assert run_on_ranks(_world, 2) == [(0, 2, 1), (1, 2, 1)]
    assert run_on_ranks(_world, 1) == [(0, 1, 1)]
    assert run_on_ranks(_pid, 2)[:1] == run_on_ranks(_pid, 1)


def _fail_on(rank: int) -> None:
    found = 40 + dist.get_rank()
    assert found != 40 + rank
    dist.barrier()


def test_a_failure_names_its_rank_and_shows_where() -> None:
    """The text has the rank, its traceback and its variables, and the stack of the rank that still waits."""
    with pytest.raises(RanksFailed) as failure:
        run_on_ranks(_fail_on, 2, 1)
    text = str(failure.value)

    assert "Rank 1: raised" in text
    assert "assert found != 40 + rank" in text
    assert "found = 41" in text
    assert "Rank 0: still running 3 s after another rank failed" in text
    assert "in _fail_on" in text


def test_a_failure_replaces_the_processes() -> None:
    """The next test meets new processes, whatever state the failed ones were in."""
    before = run_on_ranks(_pid, 2)
    with pytest.raises(RanksFailed):
        run_on_ranks(_fail_on, 2, 0)

    assert not set(before) & set(run_on_ranks(_pid, 2))
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def test_a_hang_shows_the_stack_of_the_rank_that_hangs() -> None:
    """After the timeout all ranks are killed, and the failure shows what the late one was doing."""
    run_on_ranks(_pid, 2)
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_on_ranks(_sleep_on, 2, 1, timeout=2.0)

    assert time.monotonic() - begin < 20
    assert "Rank 1: still running after 2 s" in str(failure.value)
    assert "in _sleep_on" in str(failure.value)
    assert "Rank 0" not in str(failure.value)


def _die() -> None:
    os._exit(3)


def test_a_death_is_told() -> None:
    """A rank whose process ends without a word is named with its exit code."""
    with pytest.raises(RanksFailed, match=r"Rank 0: raised\nThe process of this rank died: exit code 3"):
        run_on_ranks(_die, 1)


def _unpicklable() -> object:
    return lambda: None


def test_a_value_that_cannot_be_pickled_is_a_failure() -> None:
    """The rank says so, instead of leaving the test waiting."""
    with pytest.raises(RanksFailed, match="cannot be pickled"):
        run_on_ranks(_unpicklable, 1)


def test_a_nested_function_is_refused() -> None:
    """A body that no other process can import is refused with its name."""
    with pytest.raises(TypeError, match=r"test_a_nested_function_is_refused.*cannot run on ranks"):
        run_on_ranks(lambda: None, 1)


def _pid_and_cache() -> tuple[int, str]:
    return os.getpid(), os.environ["TORCHINDUCTOR_CACHE_DIR"]


def test_fresh_ranks_have_processes_and_caches_of_their_own() -> None:
    """``fresh`` means new processes with one empty compile cache each, ended afterwards."""
    pids, caches = zip(*run_on_ranks(_pid_and_cache, 2, fresh=True), strict=True)

    assert len({*caches}) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(cache).parent.exists() for cache in caches)


def _start_groups() -> tuple[bool, bool]:
    from megatron.core import parallel_state

    from pp_free_warmup.testing.models import parallel

    before = parallel_state.model_parallel_is_initialized()
    parallel(pp=2)
    return before, parallel_state.model_parallel_is_initialized()


def test_megatron_starts_anew_in_each_test() -> None:
    """A kept process holds neither groups nor random states of the test before."""
    assert run_on_ranks(_start_groups, 2) == [(False, True)] * 2
    assert run_on_ranks(_start_groups, 2) == [(False, True)] * 2


def test_ranks_die_with_the_test_process(tmp_path: Path) -> None:
    """When the test process is killed, its ranks end, even in the middle of a body."""
    script = tmp_path / "test_orphans.py"
    script.write_text(
        textwrap.dedent("""
        import os, time
        from pp_free_warmup.testing import ranks
        @ranks(1)
        def test_sleeps(tmp_path_factory):
            open(os.environ["PID_FILE"], "w").write(str(os.getpid()))
            time.sleep(600)
        """).replace("tmp_path_factory", "")
    )
    pid_file = tmp_path / "pid"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PID_FILE": str(pid_file)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(script)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=tmp_path) as pytest_process:
        assert _within(120, lambda: pid_file.exists() and pid_file.read_text() != "")
        pytest_process.kill()

    assert _within(20, lambda: not Path(f"/proc/{pid_file.read_text()}").exists())


def _within(seconds: float, holds: object) -> bool:
    """Tell whether *holds* comes true in time."""
    assert callable(holds)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.2)
    return False
