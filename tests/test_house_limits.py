"""The limits that keep this repository readable, checked without importing any of it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = sorted((ROOT / "pp_free_warmup").rglob("*.py"))
EVERYTHING = [
    *PACKAGE,
    *sorted((ROOT / "tests").rglob("*.py")),
    ROOT / "noxfile.py",
    *sorted((ROOT / "docs").glob("*.py")),
]
FUNCTION_LINES = 40
MODULE_LINES = 250
GUARD_LINES = 60
VAGUE = {"utils", "helpers", "manager", "common", "misc"}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _too_long(source: str) -> list[str]:
    """Name the functions of *source* that are longer than the limit."""
    functions = _functions(ast.parse(source))
    return [f"{node.name}: {_length(node)} lines" for node in functions if _length(node) > FUNCTION_LINES]


def _limit(path: Path) -> int:
    is_guard = path.parent.name == "guards" and path.name != "__init__.py"
    return GUARD_LINES if is_guard else MODULE_LINES


@pytest.mark.parametrize("path", EVERYTHING, ids=_name)
def test_functions_are_short(path):
    """A function, its docstring included, has at most 40 lines."""
    assert _too_long(path.read_text()) == []


@pytest.mark.parametrize("path", PACKAGE, ids=_name)
def test_modules_are_short(path):
    """A guard has at most 60 lines, any other module of the package at most 250."""
    assert len(path.read_text().splitlines()) <= _limit(path)


@pytest.mark.parametrize("path", EVERYTHING, ids=_name)
def test_code_is_ascii(path):
    """Code is ASCII, so that every terminal and every diff shows it alike."""
    assert path.read_text().isascii()


@pytest.mark.parametrize("path", PACKAGE, ids=_name)
def test_no_module_has_a_vague_name(path):
    """A module is named after what it does."""
    assert not VAGUE & set(path.stem.strip("_").split("_"))


def test_a_long_function_is_noticed():
    """The check itself can fail: one line more than the limit is reported."""
    body = "    pass\n"
    assert _too_long("def fits():\n" + body * (FUNCTION_LINES - 1)) == []
    assert _too_long("def long():\n" + body * FUNCTION_LINES) == ["long: 41 lines"]
