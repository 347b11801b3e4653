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
from typing import NamedTuple

import nox
from nox.command import CommandFailed

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


class Client(NamedTuple):
    """A trainer whose own code the tests run.

    Attributes:
        name: Of the test file and of the environment.
        megatron: The release whose environment it shares: what is in there is not installed twice.
        alone: What is installed without its dependencies, most of which need a GPU.
        needed: What it imports of those.
        built: Wheels for a newer glibc than this machine may have; they are only imported.
    """

    name: str
    megatron: str
    alone: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    built: tuple[str, ...] = ()


CLIENTS = (
    Client(
        "verl",
        "0.16.1",
        alone=("verl==0.9.1", "mbridge==0.15.1"),
        needed=(
            *("accelerate", "aiohttp", "codetiming", "datasets", "einops", "fastapi", "hydra-core", "numpy", "peft"),
            *("packaging", "pillow", "psutil", "ray", "safetensors", "tensordict>=0.8,<=0.10,!=0.9.0", "uvicorn"),
            "transformers>=5.5.3,<5.11,!=5.6.0",
        ),
    ),
    Client(
        "megatron_bridge",
        "0.19.2",
        alone=("megatron-bridge==0.6.2",),
        needed=(
            *("datasets", "defusedxml", "einops", "hydra-core", "nvidia-ml-py", "nvidia-modelopt==0.47.*", "omegaconf"),
            *("psutil", "pydantic", "tensorboard", "transformers==5.12.1"),
        ),
        built=("nvidia-resiliency-ext==0.7.0",),
    ),
    Client(
        "ms_swift",
        "0.16.1",
        alone=("ms-swift==4.6.0", "mcore-bridge==1.6.5"),
        needed=(
            *(
                "accelerate",
                "addict",
                "aiohttp",
                "attrdict",
                "dacite",
                "datasets<4.8.5",
                "einops",
                "fastapi",
                "modelscope",
            ),
            *(
                "importlib-metadata",
                "json-repair",
                "modelscope-hub",
                "msgspec",
                "numpy",
                "openai",
                "pandas",
                "peft<0.21",
            ),
            *(
                "pillow",
                "psutil",
                "PyYAML",
                "requests",
                "safetensors",
                "sentencepiece",
                "simplejson",
                "sortedcontainers",
            ),
            *("tensorboard", "tiktoken", "transformers>=5.5.3,<5.11", "triton", "trl==0.27.0", "uvicorn"),
        ),
    ),
)


def _built_from(home: Path, wanted: str) -> bool:
    built = home / "built-from.txt"
    return built.exists() and built.read_text() == wanted


def _client(session: nox.Session, client: Client) -> str:
    """Build the environment of one trainer, once, on top of its release's, and return its Python."""
    release = next(release for release in SUPPORTED if release.megatron == client.megatron)
    base = Path(_environment(session, release))
    home = ROOT / ".nox" / f"clients-{client.name}"
    python = str(home / "bin" / "python")
    if _built_from(home, str(client)):
        return python
    session.run(str(base), "-m", "venv", "--clear", str(home), external=True)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs, ours = (session.run(path, "-c", purelib, silent=True, external=True).strip() for path in (base, python))
    Path(ours, "release.pth").write_text(theirs)
    install = functools.partial(session.run, python, "-m", "pip", "install", "--quiet", external=True)
    if client.alone:
        install("--no-deps", *client.alone)
    if client.built:
        install("--no-deps", "--platform", "manylinux_2_39_x86_64", "--target", ours, *client.built)
    if client.needed:
        install(*client.needed)
    (home / "built-from.txt").write_text(str(client))
    return python


def _try_client(session: nox.Session, client: Client, *arguments: str) -> str:
    """Run the tests with one trainer; return what went wrong, empty for nothing."""
    pythons = next(release.pythons for release in SUPPORTED if release.megatron == client.megatron)
    if not any(map(_interpreter, pythons)):
        return f"{client.name} was not tested: it needs Python {' or '.join(pythons)}"
    try:
        python = _client(session, client)
    except CommandFailed as error:
        return f"{client.name} was not tested: it could not be installed ({error})"
    tests = f"tests/clients/real/test_{client.name}.py"
    try:
        session.run(python, "-m", "pytest", "-m", "clients", tests, *arguments, external=True)
    except CommandFailed:
        return f"{client.name} FAILED"
    return ""


@nox.session(python=False, default=False)
def clients(session: nox.Session) -> None:
    """Run other trainers' own code without and with the warmup: `nox -s clients -- verl -k packed`."""
    names = [client.name for client in CLIENTS]
    chosen = [argument for argument in session.posargs if argument in names] or names
    more = [argument for argument in session.posargs if argument not in names]
    told = [_try_client(session, client, *more) for client in CLIENTS if client.name in chosen]
    wrong = [line for line in told if line]
    failed = any(line.endswith("FAILED") for line in wrong)
    if wrong:
        (session.error if failed or os.environ.get("CI") else session.warn)("; ".join(wrong))


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
