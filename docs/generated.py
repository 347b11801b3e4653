"""The parts of the reference that are made from the code: ``python docs/generated.py`` writes them anew.

Tables stand in their pages, between two comments, so that a page is whole wherever it is read; a
test says when one is out of date. The commands' help depends on the Python that prints it, so it
is written at every build instead.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parent.parent
LABELS = ("Changed by", "Put back by", "Missed by")


def write_commands(folder: Path) -> None:
    """Write the commands' help into *folder*, as Markdown."""
    folder.mkdir(exist_ok=True)
    (folder / "cli.md").write_text(commands() + "\n")


def pages() -> dict[Path, str]:
    """Return every page that has tables, and what it should be."""
    reference = ROOT / "docs" / "reference"
    tables = {
        reference / "guarded-state.md": {"guards": guards, "states": states},
        reference / "support-matrix.md": {"releases": support_matrix},
    }
    return {page: _renewed(page.read_text(), parts) for page, parts in tables.items()}


def _renewed(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    for name, part in parts.items():
        start, end = f"<!-- {name}, made by docs/generated.py -->", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        text = f"{before}{start}\n\n{part()}\n\n{end}{rest.split(end)[1]}"
    return text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a Markdown table."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def support_matrix() -> str:
    """List the supported releases of megatron-core."""
    from pp_free_warmup._megatron.versions import SUPPORTED_MEGATRON

    rows = [
        [
            release.series,
            release.megatron,
            " or ".join(release.pythons),
            release.torch,
            "every time" if release.every_time else "`nox -s matrix`",
        ]
        for release in SUPPORTED_MEGATRON
    ]
    return table(["megatron-core", "tested release", "Python", "torch", "tests run"], rows)


def said(docstring: str) -> dict[str, str]:
    """Read a guard's docstring: its first sentence under "", then what stands after each label."""
    parts: dict[str, str] = {}
    label = ""
    for line in inspect.cleandoc(docstring).splitlines():
        start = next((known for known in LABELS if line.startswith(f"{known}:")), None)
        if start is not None:
            label, line = start, line[len(start) + 1 :]  # noqa: PLW2901
        elif not line.strip():
            label = "rest"
        parts[label] = f"{parts.get(label, '')} {line.strip()}".strip()
    return parts


def guard_row(guard: Any) -> list[str]:
    """Return one guard's row; a guard without all three labels is an error."""
    parts = said(guard.__doc__ or "")
    missing = [label for label in LABELS if label not in parts]
    if missing:
        raise ValueError(f"guard {guard.__name__} does not say: {', '.join(missing)}")
    return [f"`{guard.__name__}`", *(parts[label] for label in ("", *LABELS))]


def guards() -> str:
    """List the guards in the order in which they are entered."""
    from pp_free_warmup.guards import GUARDS

    return table(["guard", "keeps", "changed by", "put back by", "missed by"], map(guard_row, GUARDS))


def states() -> str:
    """List every kind of state that a step can touch, with its verdict."""
    listed = tomllib.loads((ROOT / "docs" / "reference" / "state-verdicts.toml").read_text())["state"]
    rows = [
        [state["name"], state["verdict"], state.get("because") or ", ".join(f"`{name}`" for name in state["by"])]
        for state in listed
    ]
    return table(["state", "verdict", "by, or because"], rows)


def commands() -> str:
    """Show each command's own help."""
    from pp_free_warmup._cli import COMMANDS

    names = [command.__name__.rpartition(".")[2] for command in COMMANDS]
    return "\n\n".join(f"```text\n{_help(name)}\n```" for name in ("", *names))


def _help(command: str) -> str:
    line = [sys.executable, "-m", "pp_free_warmup", *filter(None, [command]), "--help"]
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    return subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
