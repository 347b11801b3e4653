"""The demo as a stranger runs it: real Megatron on fresh processes, a ratio, a picture, and nothing left behind."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from made_up_records import pair
from rich.console import Console

from pp_free_warmup import testing
from pp_free_warmup._cli import _runs
from pp_free_warmup._cli._plan import Plan
from pp_free_warmup._cli._progress import Progress

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def _demo(*arguments):
    """Run the demo and return its status, its JSON and what it wrote to the standard error."""
    line = [sys.executable, "-m", "pp_free_warmup", "demo", "--json", *map(str, arguments)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def _progress():
    return Progress(Console(quiet=True), timeout=300.0)


def test_the_demo_gains_and_changes_nothing(tmp_path):
    """With the warmup the first step takes about one stage's cost, every bit is equal, and the picture is drawn."""
    path = tmp_path / "first_step.svg"
    status, found, said = _demo("--simulate-jit", 1, "--steps", 4, "--picture", path)

    assert status == 0
    assert found["identical"], found["differences"]
    assert found["compared"] > 300
    assert found["slowest_stage_cold_s"] >= 2.0
    assert found["without"]["first_step_s"] >= 4.0
    assert found["with"]["first_step_s"] >= found["with"]["warmup_s"] >= 2.0
    assert found["ratio"] > 1.4  # about 1.9 on a quiet machine; a warmup of the forwards alone would give 1.3
    rows = set(re.findall(r'id="(without|with), stage (\d+), compile (\w+)"', path.read_text()))
    assert len(rows) == 2 * 2 * 2
    shown = [int(second) for second in re.findall(r"^ *(\d+) s  ", said, flags=re.MULTILINE)]
    assert max(later - earlier for earlier, later in itertools.pairwise(shown)) <= 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "least"),
    [
        ("--pp 4 --simulate-jit 2", 3.0),
        ("--pp 2 --vpp 2 --simulate-jit 2", 1.6),
        ("--pp 2", 1.3),
        ("--pp 2 --caches shared", 0.8),
    ],
)
def test_the_promised_modes_gain(arguments, least):
    """Each mode of the README's table runs, is equal to the bit over 20 steps, and gains what a busy machine allows."""
    status, found, _ = _demo(*arguments.split())

    assert status == 0
    assert found["identical"], found["differences"]
    assert found["ratio"] > least


def raise_on_rank_1(plan, *, warmed, notes):
    """Fail as a rank might: one raises, the other waits for it."""
    if dist.get_rank() == 1:
        raise ValueError("the model is too large")
    dist.barrier()


def test_a_failing_rank_is_named_with_its_traceback(monkeypatch):
    """A rank that raises ends the run, and its number, error and line are told."""
    monkeypatch.setattr(_runs, "train", raise_on_rank_1)
    with pytest.raises(_runs.RunFailed) as failed:
        _runs.run_fresh(Plan(simulate_jit=1.0), warmed=False, timeout=120.0, progress=_progress())

    assert "in the run without the warmup" in str(failed.value)
    assert "Rank 1: raised" in str(failed.value)
    assert "ValueError: the model is too large" in str(failed.value)
    assert "in raise_on_rank_1" in str(failed.value)


def test_a_warmup_that_did_not_run_is_no_result(monkeypatch):
    """If the warmup was skipped, two equal runs prove nothing, and the demo says so."""
    skipped = {"outcome": "skipped", "reason": "switched off", "total_s": 0.0, "seconds": {}}
    ranks = [dataclasses.replace(rank, warmup=skipped) for rank in pair().warm.ranks]
    monkeypatch.setattr(testing, "run_on_ranks", lambda *_arguments, **_keywords: ranks)
    with pytest.raises(_runs.RunFailed, match=r"^rank 0 did not warm up: skipped, switched off\.$"):
        _runs.run_fresh(Plan(), warmed=True, timeout=1.0, progress=_progress())


def _status(pid):
    """Return the state and the parent of a process, or None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1])


def _descendants(pid):
    """Return every process that *pid* has started, directly or not."""
    everyone = {int(each.name): _status(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()}
    found = [pid]
    for one in found:
        found += [each for each, status in everyone.items() if status is not None and status[1] == one]
    return found[1:]


def _started(demo, least):
    """Wait until the demo has started that many processes and return their ids."""
    for _ in range(900):
        found = _descendants(demo.pid)
        if len(found) >= least:
            return found
        time.sleep(0.2)
    demo.kill()
    raise AssertionError(f"the demo started only {found}")


def _alive(pid):
    status = _status(pid)
    return status is not None and status[0] != "Z"


@contextmanager
def _interrupts(handler):
    """Let processes that are started meanwhile ignore interrupts, or hear them whatever this one does."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_ranks_never_outlive_the_demo(number, tmp_path):
    """However the demo is ended, its ranks end, and unless it was killed it leaves no files.

    A shell starts what it runs in the background with interrupts ignored, and so they stay: it is ended otherwise.
    """
    line = [sys.executable, "-m", "pp_free_warmup", "demo", "--simulate-jit", "60"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    in_background = number == signal.SIGTERM
    with (
        _interrupts(signal.SIG_IGN if in_background else signal.default_int_handler),
        subprocess.Popen(line, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as demo,
    ):
        ranks = _started(demo, least=3)  # both ranks, and the process that they are forked from
        if in_background:
            demo.send_signal(signal.SIGINT)
            time.sleep(1.0)
            assert demo.poll() is None
        demo.send_signal(number)
        assert demo.wait(timeout=60) != 0
    deadline = time.monotonic() + 120
    while any(map(_alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.2)

    assert [each for each in ranks if _alive(each)] == []
    assert number == signal.SIGKILL or list(tmp_path.iterdir()) == []
