"""Which Megatron ``import megatron.core`` finds, and whether that is the one that pip knows of; imports neither."""

from __future__ import annotations

import runpy
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class WhichMegatron:
    """What a process of this environment imports.

    Attributes:
        version: The version that the package itself tells, without a commit: from 0.19 on, Megatron adds that of
            whatever git tree lies around it, an environment's included.
        folder: Where ``megatron.core`` lies.
        commit: The commit of the git work tree that it is part of, or an empty string.
        installed: The version of the installed distribution, or None.
        installed_is_imported: False where another Megatron comes before the installed one.
    """

    version: str
    folder: Path
    commit: str
    installed: str | None
    installed_is_imported: bool


def which_megatron() -> WhichMegatron | None:
    """Look where Megatron would be imported from, or was; None if it is nowhere."""
    try:
        spec = find_spec("megatron.core")
    except ImportError:
        return None
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    told = str(runpy.run_path(str(folder / "package_info.py"))["__version__"]).partition("+")[0]
    installed, place = _installed()
    same = installed is None or (installed.partition("+")[0] == told and _is_same(place, spec.origin))
    return WhichMegatron(told, folder, _commit_of(folder), installed, same)


def imported_version() -> str | None:
    """Return the version of the Megatron that is imported, or None."""
    found = which_megatron()
    return None if found is None else found.version


def _installed() -> tuple[str | None, Path | None]:
    try:
        found = distribution("megatron-core")
    except PackageNotFoundError:
        return None, None
    return found.version, Path(str(found.locate_file("megatron/core/__init__.py")))


def _is_same(place: Path | None, origin: str) -> bool:
    """Compare with where a wheel's files lie; an editable installation has none there."""
    return place is None or not place.exists() or place.samefile(origin)


def _commit_of(folder: Path) -> str:
    """Ask git, if there is one; an environment inside somebody's work tree is not part of that tree."""
    tracked = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
    return _git(folder, "rev-parse", "--short=10", "HEAD") if tracked else ""


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
