"""`doctor` says what is installed, whether it is supported, and where compile caches lie."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._cli import _caches, doctor, main
from pp_free_warmup._cli._caches import cache_places, file_system
from pp_free_warmup._cli._which_megatron import WhichMegatron
from pp_free_warmup.errors import UnsupportedMegatron

ROOT = Path(__file__).parents[2]
MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:25 / /home rw - nfs4 server:/home rw
31 22 0:26 / /scratch rw - lustre fs@o2ib:/s rw
32 22 0:27 / /box rw - overlay overlay rw
33 22 0:28 / /fuse rw - fuse.sshfs host:/ rw
34 30 8:2 / /home/local\\040disk rw - xfs /dev/sdb1 rw
35 31 8:3 / /scratch rw - tmpfs tmpfs rw
"""


def test_a_supported_installation_ends_with_0(capsys):
    """Here, where the tests run, everything is supported, and the versions are printed."""
    assert main(["doctor"]) == 0

    said = capsys.readouterr().out
    assert "megatron-core" in said
    assert "yes: " in said


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Make a git work tree with a Megatron of another version, and put it first on the path of new processes."""
    core = tmp_path / "tree" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("from megatron.core.package_info import __version__\n")
    (core / "package_info.py").write_text('__version__ = "0.98.0+1234567"\n')
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(tmp_path / "tree"), *words], check=True)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'tree'}{os.pathsep}{ROOT}")
    return tmp_path / "tree"


def _words(table):
    """Read a printed table's second column, whose cells go over several lines."""
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", table).split())


def _asked(*arguments):
    """Run Python in a process of its own, whose path the environment sets."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=120)


SHOW = "from pp_free_warmup._cli._which_megatron import which_megatron as w; f = w(); print("


def test_what_is_imported_is_judged_and_not_what_is_installed(tree):
    """A Megatron that comes first on the path is named with its version, its place and its commit."""
    commit = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    told = _asked("-c", f"{SHOW} f.version, f.folder, f.commit, f.installed_is_imported)").stdout.split()

    assert told == ["0.98.0", str(tree / "megatron" / "core"), commit, "False"]


def test_the_doctor_says_that_another_one_is_installed(tree, monkeypatch):
    """Whoever put a tree on the path sees which Megatron is left aside, and that the tree does not fit."""
    monkeypatch.setenv("COLUMNS", "400")
    ended = _asked("-m", "pp_free_warmup", "doctor")
    said = _words(ended.stdout)

    assert ended.returncode == 1  # this one lacks everything but its version
    assert "0.98.0" in said
    assert "which is not what is imported" in said
    assert "no: " in said


def test_an_environment_inside_a_work_tree_is_not_part_of_it(tree):
    """Files that git does not track have no commit, whatever lies around them."""
    subprocess.run(["git", "-C", str(tree), "rm", "-rq", "--cached", "megatron"], check=True)

    assert _asked("-c", f"{SHOW} repr(f.commit))").stdout.strip() == "''"


def test_without_git_there_is_no_commit(tree, monkeypatch):
    """A machine without the program loses that one fact."""
    monkeypatch.setenv("PATH", "")

    assert _asked("-c", f"{SHOW} f.version, repr(f.commit))").stdout.split() == ["0.98.0", "''"]


HERE = WhichMegatron("0.16.1", Path("/x"), "", "0.16.1", installed_is_imported=True)


@pytest.mark.parametrize("version", ["0.13.1", "0.20.0", "1.0"])
def test_an_untested_release_that_fits_ends_with_0(version, monkeypatch, capsys):
    """It warms, at its user's own risk, and is not called tested."""
    monkeypatch.setattr(doctor, "which_megatron", lambda: replace(HERE, version=version))

    assert main(["doctor"]) == 0
    said = _words(capsys.readouterr().out)
    assert "is not a tested release; its functions fit: warms at your own risk" in said
    assert "yes: " not in said


def test_a_git_tree_is_told_as_one():
    """A tree of a tested series may have commits that no release has."""
    facts = doctor.megatron_facts(replace(HERE, commit="abc1234567"))

    assert str(facts["imported from"]).startswith("/x (git tree at abc1234567")
    assert doctor.judge(replace(HERE, commit="abc1234567"))[0]


def test_no_megatron_ends_with_1(monkeypatch):
    """Without megatron-core nothing can be warmed."""
    monkeypatch.setattr(doctor, "which_megatron", lambda: None)

    assert main(["doctor"]) == 1
    assert doctor.judge(None) == (False, "no: megatron-core cannot be imported")


def test_another_layout_is_named(monkeypatch):
    """A function of another form is told by name."""

    def refuse():
        raise UnsupportedMegatron("forward_step has an unknown form.", found="no 'model'", matters="-", do="-")

    monkeypatch.setattr(megatron, "check_contract", refuse)

    assert doctor.judge(HERE) == (False, "no: forward_step has an unknown form. no 'model'")


@pytest.mark.parametrize(
    ("value", "known", "told"),
    [("allow", True, "warmed"), ("refuse", True, "without"), ("", True, "not set"), ("no", False, "expected allow")],
)
def test_what_is_done_with_untested_releases_is_told(value, known, told, monkeypatch):
    """The switch is shown with what it does; one that no block accepts ends with 1."""
    monkeypatch.setenv("PP_FREE_WARMUP_UNTESTED", value)

    assert doctor.untested_switch()[0] == known
    assert told in doctor.untested_switch()[1]


@pytest.mark.parametrize(
    ("value", "told"), [("0", "no warmup runs"), ("1", "is '1': warmups run"), (None, "is not set: warmups run")]
)
def test_the_switch_is_told(value, told, monkeypatch):
    """The environment switch is shown with what it does."""
    if value is None:
        monkeypatch.delenv("PP_FREE_WARMUP", raising=False)
    else:
        monkeypatch.setenv("PP_FREE_WARMUP", value)

    assert told in doctor.switch()


@pytest.mark.parametrize(
    ("directory", "kind"),
    [
        ("/var/cache", "local (ext4)"),
        ("/home/user/.cache", "network (nfs4)"),
        ("/homestead", "local (ext4)"),
        ("/home/local disk/cache", "local (xfs)"),
        ("/box/cache", "unknown (overlay)"),
        ("/fuse/cache", "unknown (fuse.sshfs)"),
        ("/scratch/cache", "local (tmpfs)"),
    ],
)
def test_the_file_system_is_the_nearest_mount(directory, kind, monkeypatch):
    """The longest mount point that holds the directory counts, and of two alike the later one."""
    monkeypatch.setattr(_caches, "_existing", lambda path: path)

    assert file_system(directory, MOUNTS) == kind


def test_a_directory_that_is_not_there_yet_lies_where_its_parent_does(tmp_path):
    """A cache that was never written to has a file system all the same."""
    assert file_system(str(tmp_path / "not" / "yet")) == file_system(str(tmp_path))


def test_a_dead_server_does_not_hold_the_doctor_up(monkeypatch):
    """A file system that does not answer is told as such after a while."""
    answer = threading.Event()
    monkeypatch.setattr(_caches, "_existing", lambda path: answer.wait(60) and path)

    assert file_system("/nfs", MOUNTS, patience=0.05) == "does not answer within 0.05 s"
    answer.set()


def test_the_environment_moves_caches():
    """A variable that names a cache's directory wins over the default."""
    places = dict(cache_places({"TRITON_CACHE_DIR": "/fast/triton", "XDG_CACHE_HOME": "/x"}))

    assert places["Triton"] == "/fast/triton"
    assert places["torch extensions"] == "/x/torch_extensions"
