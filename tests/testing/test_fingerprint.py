"""A test that leaves something in the test process fails, whoever would have tripped over it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]

GUILTY = """
    import os

    import torch
    from megatron.core.pipeline_parallel import schedules

    def test_function():
        torch.zeros = lambda *_: None

    def test_schedule():
        schedules.forward_step = None

    def test_environment():
        os.environ["PP_FREE_WARMUP"] = "0"

    def test_directory():
        os.chdir("/")

    def test_innocent(monkeypatch):
        monkeypatch.setenv("PP_FREE_WARMUP", "1")
"""


def test_a_change_left_behind_is_named(tmp_path: Path) -> None:
    """The fixture of tests/conftest.py fails each guilty test, says what it changed, and no other test."""
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_guilty.py").write_text(textwrap.dedent(GUILTY))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "5 passed, 4 errors" in done.stdout, done.stdout
    for changed in ("torch.zeros", "schedules.forward_step", "environment", "working directory"):
        assert f"left a change behind in the test process: {changed}" in done.stdout.replace(
            "megatron.core.pipeline_parallel.", ""
        )
