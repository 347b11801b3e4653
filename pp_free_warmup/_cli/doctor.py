"""``doctor``: say what is installed, whether it is supported, and where compile caches lie."""

from __future__ import annotations

import argparse
import os
import platform
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.table import Table

from pp_free_warmup import __version__
from pp_free_warmup._cli._caches import cache_places, file_system

DESCRIPTION = """\
Print the versions that matter, whether this Megatron is supported and laid out as expected, the compile caches and
the kind of file system that they lie on, and whether the environment switches the warmup off."""
EPILOG = "Exit status: 0, or 1 if this installation is not supported."
DISTRIBUTIONS = ("torch", "megatron-core", "transformer-engine")


def add_to(commands: Any) -> None:
    """Add the parser of this command to *commands*."""
    parser = commands.add_parser(
        "doctor", help="say whether this installation is supported", description=DESCRIPTION, epilog=EPILOG
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print all findings; return 1 if the installation is not supported."""
    del arguments
    console = Console()
    versions = {name: installed(name) for name in DISTRIBUTIONS}
    facts = {"pp-free-warmup": __version__, "Python": platform.python_version(), **versions}
    supported, verdict = judge(versions["megatron-core"])
    facts["supported"] = verdict
    facts["switch"] = switch()
    _print(console, ("what", "found"), [(name, found or "not installed") for name, found in facts.items()])
    _print(console, ("compile cache", "where", "file system"), [_place(*place) for place in cache_places()])
    return 0 if supported else 1


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def judge(megatron: str | None) -> tuple[bool, str]:
    """Say whether this release of megatron-core is supported, and laid out as the warmup relies on."""
    if megatron is None:
        return False, "no: megatron-core is not installed"
    problem = contract_problem()
    if problem is not None:
        return False, f"no: {problem}"
    from pp_free_warmup._megatron.versions import SUPPORTED_MEGATRON

    tested = [release.series for release in SUPPORTED_MEGATRON]
    if ".".join(megatron.split(".")[:2]) not in tested:
        return False, f"no: {megatron} is none of the tested releases {', '.join(tested)}, though laid out like them"
    return True, f"yes: {megatron} is of a tested release, and its functions have the forms that the warmup relies on"


def contract_problem() -> str | None:
    """Import Megatron and check its layout; return what is wrong, or None."""
    from pp_free_warmup.errors import UnsupportedMegatron

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Apex is absent is not what was asked
        try:
            from pp_free_warmup._megatron import check_contract

            check_contract()
        except ImportError as error:
            return f"megatron-core cannot be imported ({error})"
        except UnsupportedMegatron as error:
            return f"{error.wrong} {error.found}"
    return None


def switch() -> str:
    """Say what the environment switch does now."""
    from pp_free_warmup._options import ENVIRONMENT_SWITCH

    value = os.environ.get(ENVIRONMENT_SWITCH)
    if value == "0":
        return f"{ENVIRONMENT_SWITCH}=0: no warmup runs in this environment"
    state = "is not set" if value is None else f"is {value!r}"
    return f"{ENVIRONMENT_SWITCH} {state}: warmups run where the code asks for them"


def _place(name: str, directory: str) -> tuple[str, str, str]:
    return name, directory, file_system(directory)


def _print(console: Console, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    console.print(table)
