"""Every kind of state that a step can touch has a verdict, and what the verdict names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import tomllib

from pp_free_warmup import _preflight, guards

ROOT = Path(__file__).resolve().parent.parent
STATES = tomllib.loads((ROOT / "docs" / "reference" / "state-verdicts.toml").read_text())["state"]
GUARDS = {guard.__name__ for guard in guards.GUARDS}
REFUSALS = {
    *re.findall(r'Refusal\(\s*"([a-z0-9-]+)"', Path(_preflight.__file__).read_text()),
    *(name for name, _, _ in _preflight.REFUSED_FIELDS.values()),
}


def wrong(state):
    """Say what is wrong with one entry."""
    verdict, by = state["verdict"], set(state.get("by", ()))
    known = {"guarded": GUARDS, "refused": REFUSALS, "harmless": set(), "yours": set()}
    if verdict not in known:
        return f"verdict {verdict!r} is none of {', '.join(known)}"
    if by - known[verdict]:
        return f"{verdict} by {', '.join(sorted(by - known[verdict]))}, which does not exist"
    if bool(by) is bool(state.get("because")):
        return "it needs either `by` or `because`"
    if verdict in {"guarded", "yours"} and "test" not in state:
        return "it needs a test"
    return _wrong_test(state["test"], by) if "test" in state else ""


def _wrong_test(test, by):
    """Check that the test function exists, and that the case in brackets is one of the guards'."""
    place, _, name = test.partition("::")
    function, _, case = name.partition("[")
    path = ROOT / place
    if not path.is_file() or function not in _functions(path):
        return f"there is no test {place}::{function}"
    if case and case.rstrip("]").partition("-")[0] not in by:
        return f"{test} is a case of another guard"
    return ""


def _functions(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("state", STATES, ids=lambda state: state["name"])
def test_what_a_verdict_names_exists(state):
    """Guards, refusals and tests are there, and every verdict has its reason."""
    assert wrong(state) == ""


def test_every_guard_keeps_some_state():
    """No guard is missing from the list."""
    assert GUARDS - {name for state in STATES for name in state.get("by", ())} == set()


def test_no_state_is_listed_twice():
    """Every kind of state has one verdict."""
    names = [state["name"] for state in STATES]
    assert len(names) == len(set(names))


GOOD = {
    "name": "n",
    "verdict": "guarded",
    "by": ["rng"],
    "test": "tests/test_guarded_state.py::test_every_guard_keeps_some_state",
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"verdict": "fine"}, "verdict 'fine' is none of guarded, refused, harmless, yours"),
        ({"by": ["luck"]}, "guarded by luck, which does not exist"),
        ({"verdict": "refused"}, "refused by rng, which does not exist"),
        ({"by": []}, "it needs either `by` or `because`"),
        ({"test": "tests/test_guarded_state.py::test_gone"}, "there is no test tests/test_guarded_state.py::test_gone"),
        ({"test": "tests/gone.py::test_gone"}, "there is no test tests/gone.py::test_gone"),
        ({"test": GOOD["test"] + "[buffers]"}, f"{GOOD['test']}[buffers] is a case of another guard"),
    ],
)
def test_a_wrong_entry_is_noticed(change, said):
    """The check can fail, and says why."""
    assert wrong(GOOD) == ""
    assert wrong({**GOOD, **change}) == said
