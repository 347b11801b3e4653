"""What `pipeline_warmup` and `warm_first_call` accept, and how they refuse the rest."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from pp_free_warmup import pipeline_warmup, warm_first_call
from pp_free_warmup._options import Options
from pp_free_warmup.errors import UnsupportedSetup, WarmupError

BAD = [
    ("enabled", 1, "1; expected a bool or a callable."),
    ("enabled", "yes", "'yes'; expected a bool or a callable."),
    ("channels", "pipe", '\'pipe\'; expected "pipeline", "all" or None.'),
    ("channels", True, 'True; expected "pipeline", "all" or None.'),
    ("on_unsupported", None, 'None; expected "skip" or "raise".'),
    ("on_failure", "skip", '\'skip\'; expected "continue" or "raise".'),
    ("timeout", 0, "0; expected seconds above 0, or None for the pipeline group's own."),
    ("timeout", -1.5, "-1.5; expected seconds above 0, or None for the pipeline group's own."),
    ("timeout", float("nan"), "nan; expected seconds above 0, or None for the pipeline group's own."),
    ("timeout", "60", "'60'; expected seconds above 0, or None for the pipeline group's own."),
    ("timeout", True, "True; expected seconds above 0, or None for the pipeline group's own."),
    ("report_to", 3, "3; expected a path, or None to write no file."),
    ("extra_guards", None, "None; expected a list."),
    ("extra_guards", len, "<built-in function len>; expected a list."),
    ("extra_guards", ["rng"], "('rng',); expected guards: callables."),
    ("verify", 1, "1; expected a bool."),
    ("shapes", [(1, 2)], "((1, 2),); expected (): nothing else is built yet."),
    ("shapes", 5, "5; expected a list."),
    ("single_flight", 1, "1; expected None: nothing else is built yet."),
]
GOOD = [
    ("enabled", False),
    ("enabled", lambda: True),
    ("channels", None),
    ("channels", "all"),
    ("on_failure", "raise"),
    ("extra_guards", [len]),
    ("extra_guards", (guard for guard in (len,))),
    ("timeout", 1),
    ("timeout", 0.5),
    ("timeout", float("inf")),
    ("on_unsupported", "raise"),
    ("verify", True),
    ("shapes", []),
    ("single_flight", None),
    ("report_to", "report.json"),
    ("report_to", Path("report.json")),
]


@pytest.mark.parametrize(("name", "value", "found"), BAD, ids=[f"{name}={value!r}" for name, value, _ in BAD])
@pytest.mark.parametrize("door", [pipeline_warmup, warm_first_call])
def test_a_wrong_option_is_refused_where_it_is_written(door, name, value, found):
    """Both doors name the option, what was given and what it takes, before anything is called."""
    with pytest.raises(UnsupportedSetup) as raised:
        door(**{name: value})

    assert raised.value.found == found
    assert raised.value.wrong.startswith(f"{name}=")
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(("name", "value"), GOOD, ids=[f"{name}={value!r:.20}" for name, value in GOOD])
@pytest.mark.parametrize("door", [pipeline_warmup, warm_first_call])
def test_what_is_documented_is_taken(door, name, value):
    """Every documented value passes both doors."""
    door(**{name: value})


def test_an_unknown_option_is_no_option():
    """A misspelt keyword is refused as Python does it, by both doors alike."""
    for door in (pipeline_warmup, warm_first_call):
        with pytest.raises(TypeError, match="chanels"):
            door(chanels="pipeline")


def test_a_decorator_reports_a_wrong_option_with_its_function_too():
    """The check does not depend on the form of the decorator."""
    with pytest.raises(UnsupportedSetup):
        warm_first_call(print, timeout=0)


def test_the_options_are_those_of_the_block():
    """`Options` has a field for every keyword of `pipeline_warmup`, with the same default."""
    parameters = inspect.signature(pipeline_warmup).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    assert {name: getattr(Options(), name) for name in Options.__slots__} == keywords


@pytest.mark.parametrize(
    ("enabled", "environment", "on"),
    [
        (True, None, True),
        (False, None, False),
        (True, "0", False),
        (True, "1", True),
        (True, "", True),
        (False, "1", False),
        (lambda: 1, None, True),
        (list, None, False),
        (lambda: True, "0", False),
    ],
)
def test_who_switches_off(monkeypatch, enabled, environment, on):
    """The environment can switch a warmup off, never on; a callable's answer counts by its truth."""
    monkeypatch.delenv("PP_FREE_WARMUP", raising=False)
    if environment is not None:
        monkeypatch.setenv("PP_FREE_WARMUP", environment)

    assert Options(enabled=enabled).is_on() is on


def test_a_callable_is_asked_each_time():
    """`enabled` may change its mind between two calls."""
    answers = iter([False, True])
    options = Options(enabled=lambda: next(answers))

    assert [options.is_on(), options.is_on()] == [False, True]


def test_the_environment_is_read_at_the_call(monkeypatch):
    """The switch need not be set when the program starts."""
    options = Options()
    monkeypatch.setenv("PP_FREE_WARMUP", "0")

    assert not options.is_on()


@pytest.mark.parametrize("model", [3, "model", [], [None], {"a": 1}, [object()]], ids=repr)
def test_what_is_no_model_is_refused(model):
    """A block for something that is no module names what it got."""
    with pytest.raises(UnsupportedSetup) as raised:
        pipeline_warmup(model)

    assert raised.value.wrong == "The model to warm is no model."


def test_every_refusal_is_a_warmup_error():
    """One class catches all that this library raises."""
    with pytest.raises(WarmupError):
        pipeline_warmup(timeout=-1)
