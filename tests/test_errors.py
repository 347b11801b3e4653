"""What each error says, in full: what is wrong, what was found, why it matters, what to do."""

from __future__ import annotations

import inspect
import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import __version__
from megatron.core.pipeline_parallel import schedules
from pipelines import call, pipeline

from pp_free_warmup import errors, in_warmup, pipeline_warmup, warm_first_call
from pp_free_warmup._ledger import Ledger
from pp_free_warmup._options import Options
from pp_free_warmup.errors import WarmupError
from pp_free_warmup.testing import ranks

# Megatron 0.19 adds the commit of the directory it runs in, after a plus sign.
RELEASE = __version__.partition("+")[0]
SCHEDULE = "forward_backward_pipelining_without_interleaving"
WORDS = {"forward_step_func": print, "data_iterator": None, "num_microbatches": 1, "seq_length": 1}
WHOLE_CALL = {**WORDS, "micro_batch_size": 1, "model": torch.nn.Identity()}


def _bare() -> Any:
    return warm_first_call(getattr(schedules, SCHEDULE), on_failure="raise")


def _raised(act: Any) -> WarmupError:
    with pytest.raises(WarmupError) as caught:
        act()
    return caught.value


def _text(*lines: str) -> str:
    return "\n".join(lines)


def test_an_error_has_its_parts_apart_and_together():
    """Code reads the parts, people read the text."""
    error = WarmupError("Wrong.", found="this; expected that.", matters="Much.", do="Something.")

    assert (error.wrong, error.found, error.matters, error.do) == (
        "Wrong.",
        "this; expected that.",
        "Much.",
        "Something.",
    )
    assert str(error) == "Wrong.\nFound: this; expected that.\nWhy it matters: Much.\nWhat to do: Something."


@pytest.mark.parametrize(
    ("error", "also"),
    [
        (errors.UnsupportedSetup, ValueError),
        (errors.WrongCall, TypeError),
        (errors.NotInitialized, RuntimeError),
        (errors.UnsupportedMegatron, RuntimeError),
        (errors.WarmupFailed, RuntimeError),
        (errors.RankSilent, errors.WarmupFailed),
        (errors.RestoreFailed, RuntimeError),
        (errors.TraceFound, RuntimeError),
    ],
)
def test_an_error_is_what_python_would_call_it(error, also):
    """Every error is a `WarmupError`, and of the built-in kind that fits."""
    assert issubclass(error, WarmupError)
    assert issubclass(error, also)


def test_no_error_is_forgotten_here():
    """Each class of the module is in the list above."""
    defined = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, WarmupError)}
    listed = {case[0] for mark in test_an_error_is_what_python_would_call_it.pytestmark for case in mark.args[1]}

    assert defined - {WarmupError} == listed


# --- raised on one rank alone, before there is anything to agree on ---------------------------------------------------


def test_a_wrong_option():
    """The option, its value, and what it takes."""
    assert str(_raised(lambda: Options(timeout=-1))) == _text(
        "timeout=-1 is not something a warmup can do.",
        "Found: -1; expected seconds above 0, or None for the pipeline group's own.",
        "Why it matters: A choice that is silently ignored would look as if it had worked.",
        "What to do: Pass a value that timeout takes, or leave it out.",
    )


def test_no_model():
    """What was given in place of one."""
    assert str(_raised(lambda: pipeline_warmup("gpt"))) == _text(
        "The model to warm is no model.",
        "Found: str 'gpt'; expected a torch.nn.Module or a list of model chunks.",
        "Why it matters: Without the model's chunks there is nothing to run a local forward and backward of.",
        "What to do: Pass what the schedule gets as model=..., or leave model out to take whatever the schedule is "
        "called with.",
    )


async def train_step() -> None:
    """Stand for a step that cannot be decorated."""


def test_an_async_function():
    """Its name, and why it cannot work."""
    assert str(_raised(lambda: warm_first_call(train_step))) == _text(
        "@warm_first_call cannot warm train_step.",
        "Found: an async function; expected a plain function, a method or a pipeline schedule.",
        "Why it matters: Its body runs after the call has returned, outside the block in which schedules are warmed.",
        "What to do: Decorate the plain function that calls the schedule, or open a pipeline_warmup block inside.",
    )


def test_a_class():
    """A class is called to make an object, not to take a step."""
    assert str(_raised(lambda: warm_first_call(Ledger))) == _text(
        "@warm_first_call cannot warm Ledger.",
        "Found: a class; expected a plain function, a method or a pipeline schedule.",
        "Why it matters: No call of it runs a pipeline schedule that could be warmed.",
        "What to do: Decorate the plain function that calls the schedule, or open a pipeline_warmup block inside.",
    )


def test_positional_arguments():
    """How many, and the form to use."""
    assert str(_raised(lambda: _bare()(print))) == _text(
        "A pipeline schedule was called with positional arguments.",
        "Found: 1 positional; expected keywords only, as Megatron's schedules take them.",
        "Why it matters: The warmup cannot tell the model from the data, and the schedule itself would refuse.",
        "What to do: Name every argument: forward_backward_func(forward_step_func=..., data_iterator=..., model=...).",
    )


def test_missing_arguments():
    """Which ones, and all that are required."""
    assert str(_raised(lambda: _bare()(model=torch.nn.Identity(), **WORDS))) == _text(
        "A pipeline schedule was called without arguments that it requires.",
        "Found: no micro_batch_size; expected data_iterator, forward_step_func, micro_batch_size, model, "
        "num_microbatches, seq_length.",
        "Why it matters: Neither the warmup nor the schedule itself can run without them.",
        "What to do: Pass them by name.",
    )


def test_torch_distributed_not_initialised():
    """What to initialise, and when."""
    assert str(_raised(lambda: _bare()(**WHOLE_CALL))) == _text(
        "torch.distributed is not initialised.",
        "Found: no default process group; expected init_process_group() and Megatron's "
        "initialize_model_parallel() before.",
        "Why it matters: Without process groups there is no pipeline whose stages could agree on a warmup.",
        "What to do: Initialise both before the schedule is called.",
    )


@ranks(1)
def test_megatron_not_initialised():
    """The same for Megatron's own groups."""
    assert str(_raised(lambda: _bare()(**WHOLE_CALL))) == _text(
        "Megatron's parallel state is not initialised.",
        "Found: no model-parallel groups; expected init_process_group() and Megatron's "
        "initialize_model_parallel() before.",
        "Why it matters: Without process groups there is no pipeline whose stages could agree on a warmup.",
        "What to do: Initialise both before the schedule is called.",
    )


def test_an_unknown_megatron(monkeypatch):
    """The installed release, the function, and what is new about it."""

    def backward_step(input_tensor, output_tensor, output_tensor_grad, config, phase) -> None:
        """Stand for a later release's."""

    monkeypatch.setattr(schedules, "backward_step", backward_step)
    known = "config, input_tensor, model_type, output_tensor, output_tensor_grad"
    assert str(_raised(pipeline_warmup().__enter__)) == _text(
        f"megatron-core {RELEASE} is not supported: schedules.backward_step has an unknown form.",
        f"Found: a required parameter 'phase'; expected only {known}.",
        "Why it matters: A warmup built on a guess could run the wrong step or exchange real tensors.",
        "What to do: Install megatron-core 0.14 to 0.19, or set PP_FREE_WARMUP=0 to run without the warmup.",
    )


def test_another_thread_that_does_not_end():
    """How long it was waited for, and how to look into the other thread."""
    book, raised = Ledger(), []
    with book.turn(1):
        thread = threading.Thread(target=lambda: raised.append(_raised(lambda: book.turn(0.01).__enter__())))
        thread.start()
        thread.join(10)

    assert str(raised[0]) == _text(
        "Another thread of this process is still warming a pipeline.",
        "Found: it did not end within 0 s; expected its end.",
        "Why it matters: Running the schedule now would train with the warmup's random state and gradients.",
        "What to do: Look at what the other thread does (py-spy dump), or pass a longer timeout.",
    )


# --- raised on every rank of a call -----------------------------------------------------------------------------------


@ranks(2)
def test_a_model_without_a_config():
    """What kind of module it is."""
    training = pipeline()
    assert str(_raised(lambda: call(training, _bare(), model=torch.nn.Linear(1, 1)))) == _text(
        "The model to warm has no Megatron config.",
        "Found: Linear without .config, wrapped modules included; expected a Megatron model chunk.",
        "Why it matters: The config says which activations a stage receives; Megatron's schedule needs it too.",
        "What to do: Pass the chunks that Megatron's model provider built.",
    )


@ranks(2)
def test_another_number_of_iterators():
    """Both numbers, and the form to use."""
    training = pipeline()
    assert str(_raised(lambda: call(training, _bare(), data_iterator=[None, None]))) == _text(
        "The schedule got another number of data iterators than of model chunks.",
        "Found: 2 iterators for 1 chunks; expected one each.",
        "Why it matters: The warmup would feed a chunk from the wrong iterator.",
        "What to do: Pass data_iterator as a list with one entry (or None) per model chunk.",
    )


def _fail() -> None:
    if in_warmup() and dist.get_rank() == 1:
        raise ValueError("no such kernel")


@ranks(2)
def test_a_failed_pass():
    """Which rank failed and how; on each rank, whether its first batch is gone."""
    training = pipeline(also=_fail)
    consumed = " 1 batch(es) fetched on this rank are consumed." if dist.get_rank() == 0 else ""
    assert str(_raised(lambda: call(training, _bare()))) == _text(
        "The warmup of the pipeline failed and was undone.",
        "Found: rank 1: ValueError: no such kernel; expected every rank to finish its local pass.",
        f"Why it matters: This call's real step was not run, and this rank's state was put back.{consumed}",
        "What to do: Leave on_failure at 'continue' to go on without a warmup, or set PP_FREE_WARMUP=0; if the run is "
        "sound then, report the error named above.",
    )


@ranks(2)
def test_an_error_of_this_library_in_another_rank():
    """Another rank's error of four parts is told by its first two."""
    training = pipeline()
    iterators = [None, None] if dist.get_rank() == 1 else training.iterators
    error = _raised(lambda: call(training, _bare(), data_iterator=iterators))
    told = (
        "rank 1: UnsupportedSetup: The schedule got another number of data iterators than of model chunks. "
        "2 iterators for 1 chunks; expected one each; expected every rank to finish its local pass."
    )

    assert error.found == (told if dist.get_rank() == 0 else "2 iterators for 1 chunks; expected one each.")


@ranks(2)
def test_a_refused_setup_that_is_to_stop():
    """The reason with its id, from the rank that has it."""
    training = pipeline()
    schedule = warm_first_call(getattr(schedules, SCHEDULE), on_unsupported="raise")
    iterator = [1, 2] if dist.get_rank() == 1 else None
    assert str(_raised(lambda: call(training, schedule, data_iterator=[iterator]))) == _text(
        "This pipeline cannot be warmed.",
        "Found: rank 1: data_iterator is a list, with neither __next__ nor get_next and offset [unreadable-iterator]; "
        "pass an iterator: iter(loader)",
        "Why it matters: A wrong warmup is worse than none, and on_unsupported='raise' asks to stop instead.",
        "What to do: Change the setup as the reason says, or leave on_unsupported at 'skip'.",
    )


@ranks(2)
def test_a_guard_that_cannot_put_back():
    """Which guard, on which rank, why, and to stop the run."""

    @contextmanager
    def scratch_disk(schedule_call):
        yield
        if dist.get_rank() == 0:
            raise OSError("disk full")

    training = pipeline()
    schedule = warm_first_call(getattr(schedules, SCHEDULE), extra_guards=[scratch_disk])
    error = _raised(lambda: call(training, schedule))
    if dist.get_rank() == 0:
        assert str(error) == _text(
            "The warmup ran, but on rank 0 not all could be put back: guard 'scratch_disk'.",
            "Found: scratch_disk: OSError: disk full.",
            "Why it matters: The model's state on rank 0 is unknown; training from here could silently differ.",
            "What to do: Stop this run. Start it again with PP_FREE_WARMUP=0 and report the cause shown above.",
        )
    else:
        assert str(error) == _text(
            "The warmup of the pipeline failed, and not every rank could undo it.",
            "Found: rank 0: RestoreFailed: The warmup ran, but on rank 0 not all could be put back: guard "
            "'scratch_disk'. scratch_disk: OSError: disk full; expected every rank to finish its local pass.",
            "Why it matters: The state of the ranks named is unknown; training from here could silently differ.",
            "What to do: Stop this run. Start it again with PP_FREE_WARMUP=0 and report the error named above.",
        )
