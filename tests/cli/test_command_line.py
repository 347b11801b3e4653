"""The command line itself: what it refuses, how it says so, and how light it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pp_free_warmup import __version__
from pp_free_warmup._cli import main

ROOT = Path(__file__).resolve().parent.parent.parent
REFUSED = {
    "no command": ([], "COMMAND"),
    "another command": (["dmeo"], "invalid choice: 'dmeo'"),
    "one stage": (["demo", "--pp", "1"], "argument --pp: '1' is no whole number from 2 on"),
    "half a stage": (["demo", "--pp", "2.5"], "argument --pp: '2.5' is no whole number from 2 on"),
    "one chunk": (["demo", "--vpp", "1"], "argument --vpp: '1' is no whole number from 2 on"),
    "too few steps": (["demo", "--steps", "2"], "argument --steps: '2' is no whole number from 3 on"),
    "no runs": (["demo", "--repeat", "0"], "argument --repeat: '0' is no whole number from 1 on"),
    "no delay": (["demo", "--simulate-jit", "0"], "argument --simulate-jit: '0' is no number of seconds above 0"),
    "a word": (["demo", "--simulate-jit", "long"], "argument --simulate-jit: 'long' is no number of seconds above 0"),
    "not a number": (["demo", "--timeout", "nan"], "argument --timeout: 'nan' is no number of seconds above 0"),
    "another device": (["demo", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    "other caches": (["demo", "--caches", "none"], "argument --caches: invalid choice: 'none'"),
    "another format": (["demo", "--picture", "step.gif"], "--picture step.gif: the name must end in .png or .svg"),
    "a lost folder": (["demo", "--picture", "no/where.svg"], "--picture no/where.svg: there is no folder no"),
    "no such case": (["bench", "--device", "cpu", "--only", "fp4"], "--only fp4: can be local-bf16"),
    "one steady step": (["bench", "--steady", "1"], "argument --steady: '1' is no whole number from 2 on"),
    "too few GPUs for the bench": (["bench", "--pp", "4096"], "--device cuda with 4096 stages of 1 ranks: 4096 ranks "),
    "too few GPUs": (["demo", "--device", "cuda", "--pp", "4096"], "--device cuda --pp 4096: 4096 ranks "),
}


@pytest.mark.parametrize(("arguments", "told"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_its_reason(arguments, told, capsys):
    """Arguments that cannot be end with status 2, the usage and one sentence; nothing is started."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    said = capsys.readouterr()
    assert told in said.err
    assert said.err.startswith("usage: ") or "usage: " in said.err
    assert said.out == ""


def test_the_version_is_the_packages(capsys):
    """--version prints the version."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    "arguments", [["--help"], *([command, "--help"] for command in ("demo", "run", "bench", "doctor"))], ids=" ".join
)
def test_help_is_light(arguments):
    """Help is printed without importing torch or Megatron."""
    code = f"""
import sys
from pp_free_warmup.__main__ import main
try:
    main({arguments})
except SystemExit as ended:
    print(ended.code, sorted({{"torch", "megatron", "matplotlib"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.splitlines()[-1] == "0 []"
    assert done.stdout.startswith("usage: pp-free-warmup")
