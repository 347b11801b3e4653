"""The docs name what there is, link to what there is, and their code is code."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import pp_free_warmup
from pp_free_warmup import _preflight, errors

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_" not in str(path.parent.name)),
]
MODULES = sorted(module.name for module in pkgutil.walk_packages(pp_free_warmup.__path__, "pp_free_warmup."))
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


def _name(path):
    return str(path.relative_to(ROOT))


def _refusal_ids():
    """Return the ids of all refusals, as they stand in the source of the preflight."""
    tree = ast.parse((ROOT / "pp_free_warmup" / "_preflight.py").read_text())
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Refusal"
    ]
    ids = {call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)}
    return ids | {name for name, _, _ in _preflight.REFUSED_FIELDS.values()}


def _broken_links(page):
    """Return the relative links of *page* that lead nowhere."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", page.read_text())
    return [target for target in targets if "://" not in target and not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page):
    """Every relative link of a page names a file that exists."""
    assert _broken_links(page) == []


def test_a_broken_link_is_noticed(tmp_path):
    """The check of links can fail."""
    page = tmp_path / "page.md"
    page.write_text("[there](page.md#part), [gone](gone.md), [outside](https://example.org/x)")
    assert _broken_links(page) == ["gone.md"]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_python_blocks_are_python(page):
    """Every Python block of a page can be parsed."""
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        ast.parse(block)


def _generated_pages():
    spec = importlib.util.spec_from_file_location("generated", ROOT / "docs" / "generated.py")
    generated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generated)
    return generated.pages()


def test_tables_are_those_of_the_code():
    """A table that is made from the code is current; ``python docs/generated.py`` makes it so."""
    for page, expected in _generated_pages().items():
        assert page.read_text() == expected


def test_every_error_is_described():
    """The reference of errors has a heading for every exception that a user can meet."""
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "reference" / "errors.md").read_text(), flags=re.MULTILINE)
    known = [name for name, value in vars(errors).items() if inspect.isclass(value) and value is not errors.WarmupError]
    assert headings == known


def test_every_refusal_is_described():
    """The reference of errors has a row for every setup that the preflight refuses, and no other."""
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", page, flags=re.MULTILINE)
    assert set(rows) == _refusal_ids()


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_docstring_examples_hold(name):
    """Every example in a docstring gives what it says."""
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs={"torch": torch}, optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.ranks
@pytest.mark.parametrize("example", EXAMPLES, ids=_name)
def test_examples_run(example):
    """Every example of the docs runs to its end, as a reader would start it."""
    run = partial(subprocess.run, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    try:
        done = run([sys.executable, str(example)], timeout=280)
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"still running; it printed:\n{late.output}")
    assert done.returncode == 0, done.stdout
