"""What is built, installed and imported is what the repository says it is."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import pp_free_warmup

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {str(path.relative_to(ROOT)) for path in (ROOT / "pp_free_warmup").rglob("*.py")}


def _python(code, **options):
    """Run *code* in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _setup_cfg():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return settings


def _built(suffix):
    """Return the built file with that ending, or skip: `nox -s release_check` builds it and names its folder."""
    if "RELEASE_FILES" not in os.environ:
        pytest.skip("nothing is built; run nox -s release_check")
    (file,) = Path(os.environ["RELEASE_FILES"]).glob(f"*{suffix}")
    return file


def test_every_public_name_can_be_imported():
    """Each name in __all__ leads to something, and dir() lists it."""
    for name in pp_free_warmup.__all__:
        assert getattr(pp_free_warmup, name) is not None
        assert name in dir(pp_free_warmup)


def test_an_unknown_name_is_refused():
    """A misspelt name is an AttributeError that says which."""
    with pytest.raises(AttributeError, match=r"^module 'pp_free_warmup' has no attribute 'pipeline_warmpu'$"):
        _ = pp_free_warmup.pipeline_warmpu


def test_the_bare_import_is_light():
    """`import pp_free_warmup` imports neither torch nor Megatron."""
    heavy = "sorted({'torch', 'megatron', 'transformer_engine', 'numpy'} & set(sys.modules))"
    assert _python(f"import sys, pp_free_warmup; print({heavy})", cwd=ROOT).strip() == "[]"


def test_importing_all_of_it_starts_nothing():
    """Asking for every public name initialises no CUDA, starts no process group and makes no tracker of Megatron's."""
    code = """
import pp_free_warmup, torch
for name in pp_free_warmup.__all__:
    getattr(pp_free_warmup, name)
from megatron.core.tensor_parallel import random
print(torch.cuda.is_initialized(), torch.distributed.is_initialized(), random._CUDA_RNG_STATE_TRACKER_INITIALIZED)
"""
    assert _python(code, cwd=ROOT).split() == ["False", "False", "False"]


def test_the_version_has_an_entry_in_the_changelog():
    """The changelog has a heading for the version that is built."""
    headings = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "docs" / "changelog.md").read_text(), flags=re.MULTILINE)
    assert pp_free_warmup.__version__ in headings


def test_the_command_leads_to_a_function():
    """The console script names something that exists."""
    line = _setup_cfg()["options.entry_points"]["console_scripts"].strip()
    module, function = line.partition(" = ")[2].split(":")
    assert callable(getattr(__import__(module, fromlist=[function]), function))


def test_the_readme_fits_on_a_screen_or_two():
    """README.md has at most 100 lines."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_the_wheel_holds_the_package_and_nothing_else():
    """The wheel has every module, py.typed, its metadata, and no other file."""
    names = set(zipfile.ZipFile(_built(".whl")).namelist())
    assert {name for name in names if ".dist-info/" not in name} == SOURCES | {"pp_free_warmup/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_source_archive_can_be_built_from():
    """The source archive has every module, the licence, the README and the build settings."""
    with tarfile.open(_built(".tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= SOURCES | {"LICENSE", "README.md", "setup.cfg", "pyproject.toml", "pp_free_warmup/py.typed"}


def test_the_wheel_alone_can_be_imported(tmp_path):
    """Unpacked outside the clone, the wheel imports from there."""
    zipfile.ZipFile(_built(".whl")).extractall(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import pp_free_warmup; print(pp_free_warmup.__file__)"
    assert _python(code, cwd=tmp_path).strip() == str(tmp_path / "pp_free_warmup" / "__init__.py")
