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
from pp_free_warmup._cli._which_megatron import WhichMegatron, which_megatron

DESCRIPTION = """\
Print the versions that matter, which Megatron is imported and from where, whether it is supported and laid out as
expected, the compile caches and the kind of file system that they lie on, and what the environment's switches do."""
EPILOG = "Exit status: 0, also for a release that was not tested but fits; 1 if this installation cannot be warmed."
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
    found = which_megatron()
    facts = {"pp-free-warmup": __version__, "Python": platform.python_version(), "torch": installed("torch")}
    facts |= megatron_facts(found) | {"transformer-engine": installed("transformer-engine")}
    supported, facts["supported"] = judge(found)
    known, facts["untested releases"] = untested_switch()
    facts["switch"] = switch()
    _print(console, ("what", "found"), [(name, value or "not installed") for name, value in facts.items()])
    _print(console, ("compile cache", "where", "file system"), [_place(*place) for place in cache_places()])
    return 0 if supported and known else 1


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def megatron_facts(found: WhichMegatron | None) -> dict[str, str | None]:
    """Say which Megatron is imported, from where, and whether it is the one that is installed."""
    if found is None:
        return {"megatron-core": None}
    tree = f" (git tree at {found.commit}: what it has of its own, nobody here knows)" if found.commit else ""
    facts: dict[str, str | None] = {"megatron-core": found.version, "imported from": f"{found.folder}{tree}"}
    if not found.installed_is_imported:
        facts["installed"] = (
            f"{found.installed}, which is not what is imported: another Megatron comes first (on PYTHONPATH?)"
        )
    return facts


def judge(found: WhichMegatron | None) -> tuple[bool, str]:
    """Say whether the Megatron that is imported is supported, and laid out as the warmup relies on."""
    if found is None:
        return False, "no: megatron-core cannot be imported"
    problem = contract_problem()
    if problem is not None:
        return False, f"no: {problem}"
    from pp_free_warmup._megatron.versions import is_tested

    if not is_tested(found.version):
        return True, f"{found.version} is not a tested release; its functions fit: warms at your own risk"
    return True, f"yes: {found.version} is of a tested release, and its functions have the forms that are relied on"


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


def untested_switch() -> tuple[bool, str]:
    """Say what happens with releases that were not tested; False where blocks refuse to be entered."""
    from pp_free_warmup._options import UNTESTED_SWITCH

    told = {
        "": f"{UNTESTED_SWITCH} is not set: warmed, and the log says so",
        "allow": f"{UNTESTED_SWITCH}=allow: warmed",
        "refuse": f"{UNTESTED_SWITCH}=refuse: run without a warmup",
    }
    value = os.environ.get(UNTESTED_SWITCH, "")
    if value in told:
        return True, told[value]
    return False, f"{UNTESTED_SWITCH}={value}: an error where a block is entered; expected allow or refuse"


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
