"""What a clone can do: `nox` runs the checks and the tests, `nox -s demo` the demo, and `nox -l` lists all.

One environment per megatron-core release, in `.nox/`, is shared by every session
that needs that release: it holds torch, which nobody wants twice.
"""

from __future__ import annotations

import configparser
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
TOOLS = ("ruff==0.17.6", "import-linter==2.17", "pytest", "pytest-timeout")
IN_ENVIRONMENT = ("mypy==2.4.1", "-e", ".[test,docs]")

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True


def _supported() -> tuple:
    """Read the list of releases from the package, without importing the package and so torch."""
    path = ROOT / "pp_free_warmup" / "_megatron" / "versions.py"
    spec = importlib.util.spec_from_file_location("versions", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.SUPPORTED_MEGATRON


SUPPORTED = _supported()
FIRST = next(release for release in SUPPORTED if release.every_time)
EVERY_TIME = [f"tests-{release.megatron}" for release in SUPPORTED if release.every_time]
nox.options.sessions = ["lint", "types", "docs", *EVERY_TIME]


def _candidates(version: str) -> list[str]:
    """List where Python *version* may be: the running one, on PATH, among pyenv's, which PATH may hide."""
    found = [sys.executable, shutil.which(f"python{version}")]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True).stdout.strip()
        found += sorted(str(path) for path in Path(root, "versions").glob(f"{version}.*/bin/python"))
    return [path for path in found if path]


@functools.cache
def _interpreter(version: str) -> str | None:
    """Return a Python of that version which can build an environment, or None."""
    question = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    for path in _candidates(version):
        answer = subprocess.run([path, "-c", question], capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip() == version:
            return path
    return None


def _requirements() -> str:
    """Return what setup.cfg says an installation is made of."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return str([dict(settings[part]) for part in settings.sections() if part.startswith("options")])


def _environment(session: nox.Session, release: tuple) -> str:
    """Build the environment of one release, once, and return its Python; skip the session where that Python lacks."""
    interpreter = next(filter(None, map(_interpreter, release.pythons)), None)
    if interpreter is None:
        stop = session.error if os.environ.get("CI") else session.skip
        stop(
            f"needs Python {' or '.join(release.pythons)}, and found none here; install one, or run another of `nox -l`"
        )
    home = ROOT / ".nox" / f"megatron-{release.megatron}"
    python = str(home / "bin" / "python")
    built, wanted = home / "built-from.txt", f"{release} {IN_ENVIRONMENT} {_requirements()}"
    if not built.exists() or built.read_text() != wanted:
        session.run(interpreter, "-m", "venv", str(home), external=True)
        install = functools.partial(session.run, python, "-m", "pip", "install", "--quiet", external=True)
        # torch first and by itself, so that pip takes the build that its settings name and not the newest one.
        install(f"torch=={release.torch}")
        install(f"megatron-core=={release.megatron}", f"torch=={release.torch}", *IN_ENVIRONMENT)
        built.write_text(wanted)
    return python


def _run(session: nox.Session, release: tuple, *arguments: str) -> None:
    """Run the environment's Python with *arguments*."""
    session.run(_environment(session, release), *arguments, external=True)


def _here() -> tuple:
    """Return the first release, of those tested every time, that this machine has a Python for."""
    tested = [release for release in SUPPORTED if release.every_time]
    return next((release for release in tested if any(map(_interpreter, release.pythons))), FIRST)


@nox.session
def lint(session: nox.Session) -> None:
    """Check the format, the lint rules, the import layers and the house limits."""
    session.install(*TOOLS)
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("lint-imports", "--no-logo")
    session.run("python", "-m", "pytest", "-q", "--noconftest", "tests/test_house_limits.py")


@nox.session(python=False)
def types(session: nox.Session) -> None:
    """Type-check the package strictly, and user code as a user writes it."""
    _run(session, FIRST, "-m", "mypy", *session.posargs)


@nox.session(python=False)
def docs(session: nox.Session) -> None:
    """Build the docs with warnings as errors, and run their examples."""
    build = ("-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "docs")
    session.env["PYTHONWARNINGS"] = "ignore"  # what Megatron says about packages that it does without
    _run(session, _here(), *build, "docs/_build/html", "-b", "html")
    _run(session, _here(), *build, "docs/_build/doctest", "-b", "doctest")
    session.log("the first page is docs/_build/html/index.html")


def _tests(release: tuple) -> None:
    """Define the test session of one release."""

    def tests(session: nox.Session) -> None:
        _run(session, release, "-m", "pytest", *session.posargs)

    tests.__doc__ = f"Run the tests with megatron-core {release.megatron} on Python {' or '.join(release.pythons)}."
    nox.session(tests, name=f"tests-{release.megatron}", python=False, default=release.every_time)


for _release in SUPPORTED:
    _tests(_release)


@nox.session(name="tests-main", python=False, default=False)
def tests_main(session: nox.Session) -> None:
    """Run the tests on a git checkout of Megatron-LM: `MEGATRON=path nox -s tests-main`."""
    checkout = os.environ.get("MEGATRON", "")
    if not Path(checkout, "megatron", "core").is_dir() or not checkout:
        session.error(f"set MEGATRON to a checkout of Megatron-LM, one with megatron/core in it; it is {checkout!r}")
    newest = [release for release in SUPPORTED if release.every_time][-1]
    first = [str(Path(checkout).resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    session.env |= {"PYTHONPATH": os.pathsep.join(first), "PP_FREE_WARMUP_UNTESTED": "allow"}
    _run(session, newest, "-m", "pytest", *session.posargs)


@nox.session(python=False, default=False)
def matrix(session: nox.Session) -> None:
    """Run the tests with every supported release of megatron-core."""
    for release in SUPPORTED:
        session.notify(f"tests-{release.megatron}")


@nox.session(python=False, default=False)
def demo(session: nox.Session) -> None:
    """Train a small Megatron GPT without and with the warmup, and compare: `nox -s demo -- --pp 4`."""
    _run(session, _here(), "-m", "pp_free_warmup", "demo", *session.posargs)


@nox.session(python=False, default=False)
def bench(session: nox.Session) -> None:
    """Measure, and write the numbers that the docs show."""
    _run(session, _here(), "-m", "pp_free_warmup", "bench", *session.posargs)


@nox.session(python=False, default=False)
def slow(session: nox.Session) -> None:
    """Run the tests that take minutes: every configuration, bit for bit."""
    for release in (release for release in SUPPORTED if release.every_time):
        _run(session, release, "-m", "pytest", "-m", "slow", *session.posargs)


@nox.session(python=False, default=False)
def faults(session: nox.Session) -> None:
    """Inject faults on every rank and at every point: nothing hangs, nothing leaks, every failure is named."""
    _run(session, _here(), "-m", "pytest", "-m", "faults", "-s", *session.posargs)


@nox.session(python=False, default=False)
def gpu(session: nox.Session) -> None:
    """Run the GPU tests, in the environment that is active: it must have torch, Megatron and TE."""
    session.run("python", "-m", "pytest", "-m", "gpu", "tests/gpu", *session.posargs, external=True)


@nox.session(python=False, default=False)
def release_check(session: nox.Session) -> None:
    """Build, check the contents and the metadata, and import the built wheel outside the clone."""
    _run(session, FIRST, "-m", "pip", "install", "--quiet", "build", "twine")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    _run(session, FIRST, "-m", "build", "--outdir", "dist")
    built = sorted(map(str, (ROOT / "dist").iterdir()))
    _run(session, FIRST, "-m", "twine", "check", "--strict", *built)
    session.env["RELEASE_FILES"] = str(ROOT / "dist")
    _run(session, FIRST, "-m", "pytest", "tests/test_packaging.py")
