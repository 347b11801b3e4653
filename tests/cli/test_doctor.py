"""`doctor` says what is installed, whether it is supported, and where compile caches lie."""

from __future__ import annotations

import threading

import pytest

from pp_free_warmup import _megatron as megatron
from pp_free_warmup._cli import _caches, doctor, main
from pp_free_warmup._cli._caches import cache_places, file_system
from pp_free_warmup.errors import UnsupportedMegatron

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


@pytest.mark.parametrize("version", ["0.13.1", "0.20.0", "1.0"])
def test_an_untested_release_ends_with_1(version, monkeypatch, capsys):
    """A release that was never tested is not supported, even if it is laid out alike."""
    monkeypatch.setattr(doctor, "installed", lambda name: version if name == "megatron-core" else None)

    assert main(["doctor"]) == 1
    assert "no: " in capsys.readouterr().out


def test_no_megatron_ends_with_1(monkeypatch):
    """Without megatron-core nothing can be warmed."""
    monkeypatch.setattr(doctor, "installed", lambda _name: None)

    assert main(["doctor"]) == 1
    assert doctor.judge(None) == (False, "no: megatron-core is not installed")


def test_another_layout_is_named(monkeypatch):
    """A function of another form is told by name."""

    def refuse():
        raise UnsupportedMegatron("forward_step has an unknown form.", found="no 'model'", matters="-", do="-")

    monkeypatch.setattr(megatron, "check_contract", refuse)

    assert doctor.judge("0.16.1") == (False, "no: forward_step has an unknown form. no 'model'")


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
