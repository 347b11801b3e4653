"""Each guard has its file, its place in the order, its three docstring lines and its case."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from cases import CASES

from pp_free_warmup import guards

FOLDER = Path(guards.__file__).parent
FILES = sorted(path for path in FOLDER.glob("*.py") if path.name != "__init__.py")
NAMES = [guard.__name__ for guard in guards.GUARDS]
LABELS = ("Changed by:", "Put back by:", "Missed by:")
LINES = 60


def forgotten(name, source, in_guards, in_cases):
    """Say which steps of adding the guard *name* were forgotten."""
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        return [f"guards/{name}.py has no function {name}"]
    found = [f"guards/{name}.py has no docstring"] if not ast.get_docstring(ast.parse(source)) else []
    docstring = ast.get_docstring(functions[name]) or ""
    lines = docstring.splitlines()
    for label in LABELS:
        if not any(line.startswith(label) and line != label for line in lines):
            found.append(f"the docstring of guards/{name}.py has no line '{label} ...'")
    if name not in in_guards:
        found.append(f"guards/{name}.py is not in GUARDS of guards/__init__.py")
    if name not in in_cases:
        found.append(f"{name} has no case in tests/guards/cases.py")
    if len(source.splitlines()) > LINES:
        found.append(f"guards/{name}.py has {len(source.splitlines())} lines; a guard has at most {LINES}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_step_of_adding_a_guard_was_forgotten(path):
    """Every file in guards/ is in the order, documented, short, and under the laws."""
    assert forgotten(path.stem, path.read_text(), NAMES, {case.guard.__name__ for case in CASES}) == []


def test_every_guard_has_its_own_file():
    """What is in GUARDS is in a file of its name, once."""
    assert sorted(NAMES) == [path.stem for path in FILES]


def test_random_numbers_are_saved_first_and_put_back_last():
    """The other guards may draw numbers while they save and put back."""
    assert NAMES[0] == "rng"


LINES_OF_DOC = "Keep it.\n\n    Changed by: a.\n    Put back by: b.\n    Missed by: c.\n    "
GOOD = f'"""A tracker."""\ndef ema(call):\n    """{LINES_OF_DOC}"""'


@pytest.mark.parametrize(
    ("source", "in_guards", "in_cases", "sentence"),
    [
        (GOOD, [], ["ema"], "guards/ema.py is not in GUARDS of guards/__init__.py"),
        (GOOD, ["ema"], [], "ema has no case in tests/guards/cases.py"),
        (
            GOOD.replace("Missed by", "By"),
            ["ema"],
            ["ema"],
            "the docstring of guards/ema.py has no line 'Missed by: ...'",
        ),
        (GOOD.replace("ema", "other"), ["ema"], ["ema"], "guards/ema.py has no function ema"),
        (GOOD.replace('"""A tracker."""\n', ""), ["ema"], ["ema"], "guards/ema.py has no docstring"),
        (GOOD + "\n" * 60, ["ema"], ["ema"], "guards/ema.py has 67 lines; a guard has at most 60"),
    ],
)
def test_the_message_names_the_forgotten_step(source, in_guards, in_cases, sentence):
    """The check can fail, and says what to do in one sentence."""
    assert forgotten("ema", GOOD, ["ema"], ["ema"]) == []
    assert forgotten("ema", source, in_guards, in_cases) == [sentence]
