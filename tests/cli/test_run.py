"""``run`` warms a script that knows nothing of it, and is otherwise what ``python SCRIPT`` is."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pp_free_warmup import pipeline_warmup
from pp_free_warmup._cli.run import OPTIONS

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LOOKS = """\
    import sys
    from pp_free_warmup import _patch
    options = _patch.armed()[0]._options
    print(__name__, sys.argv, sys.path[0], options.channels, options.timeout, options.on_failure, options.verify)
    sys.exit(7)
"""


def _run(*words: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with *words*, in the tests' environment."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(environment or {})},
    )


def _made(ended: subprocess.CompletedProcess[str]) -> list[str]:
    assert ended.returncode == 0, ended.stderr
    return sorted(line for line in ended.stdout.splitlines() if line.startswith(("0: ", "1: ")))


@pytest.mark.ranks
def test_a_script_is_warmed_and_makes_the_same_bits(tmp_path):
    """Under torchrun, with arguments of its own: equal losses and parameters, and one report at the end."""
    arguments = [HERE / "trainer.py", "--lr", "0.1"]
    cold = _run(*TORCHRUN, *arguments)
    warm = _run(*TORCHRUN, "-m", "pp_free_warmup", "run", "--report-to", tmp_path / "report.json", *arguments)

    assert len(_made(cold)) == 2
    assert _made(warm) == _made(cold)
    assert warm.stdout.count("pp_free_warmup: training warmed in") == 1
    assert '"outcome": "warmed"' in (tmp_path / "report.json").read_text()


@pytest.mark.ranks
@pytest.mark.slow
def test_megatrons_own_loop_is_warmed_with_no_line_changed():
    """``pretrain()`` with evaluation: every loss, input, printed number and parameter is equal; both kinds warmed."""
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("this release's wheel has no megatron.training")
    script = HERE.parent / "clients" / "pretrain_script.py"
    cold, warm = _run(*TORCHRUN, script), _run(*TORCHRUN, "-m", "pp_free_warmup", "run", script)

    assert len(_made(cold)) == 2
    assert _made(warm) == _made(cold)
    for ended, passes in ((cold, 0), (warm, 2)):
        assert all(f"{rank} passes: {passes}" in ended.stdout for rank in (0, 1)), ended.stdout[-3000:]
    assert all(f"pp_free_warmup: {kind} warmed in" in warm.stdout for kind in ("training", "forward-only"))


@pytest.fixture
def looking(tmp_path):
    """A script that prints what it finds, and exits with a status of its own."""
    script = tmp_path / "looking.py"
    script.write_text(textwrap.dedent(LOOKS))
    return script


def test_a_script_finds_itself_as_python_would_run_it(looking, tmp_path):
    """Its name, arguments, import path and exit status are those of ``python SCRIPT``."""
    ended = _run("-m", "pp_free_warmup", "run", looking, "-m", "--channels", "none")

    found = f"__main__ {[str(looking), '-m', '--channels', 'none']} {tmp_path} pipeline None continue False"
    assert (ended.returncode, ended.stdout.splitlines()[0]) == (7, found), ended.stderr


def test_a_module_finds_itself_as_python_would_run_it(looking, tmp_path):
    """After ``-m`` comes a module's name, and everything else is the module's."""
    ended = _run(
        "-m", "pp_free_warmup", "run", "-m", "looking", "--lr", "1", environment={"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    )

    assert ended.returncode == 7, ended.stderr
    assert ended.stdout.startswith(f"__main__ {[str(looking), '--lr', '1']} ")


def test_options_come_from_flags_and_from_the_environment(looking):
    """A flag wins over a variable, and a variable over the default."""
    environment = {"PP_FREE_WARMUP_CHANNELS": "all", "PP_FREE_WARMUP_TIMEOUT": "7"}
    flags = ["--timeout", "9", "--on-failure", "raise", "--verify"]
    ended = _run("-m", "pp_free_warmup", "run", *flags, looking, environment=environment)

    assert ended.stdout.splitlines()[0].endswith("all 9.0 raise True")


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_one_of_a_block(option):
    """What ``run`` takes is what `pipeline_warmup` takes, under the same name."""
    assert option.name in inspect.signature(pipeline_warmup).parameters


@pytest.mark.parametrize(
    ("words", "environment", "told"),
    [
        (["run"], {}, "name a script, or a module after -m"),
        (["run", "nowhere.py"], {}, "there is no script nowhere.py"),
        (["run", "--channels", "some", "x.py"], {}, "argument --channels: 'some' is none of pipeline, all, none"),
        (["run", __file__], {"PP_FREE_WARMUP_TIMEOUT": "-1"}, "PP_FREE_WARMUP_TIMEOUT: '-1' is no number of seconds"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(words, environment, told):
    """Status 2, the usage and one sentence."""
    ended = _run("-m", "pp_free_warmup", *words, environment=environment)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert told in ended.stderr
