"""`warm_first_call` in every way people will use it: each model and kind of call warms exactly once."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from pipelines import SMALL, VIRTUAL, Witness, call, fetched, pipeline

from pp_free_warmup import in_warmup, pipeline_warmup, warm_first_call
from pp_free_warmup._decorator import is_schedule
from pp_free_warmup._ledger import FORWARD_ONLY, TRAINING, ledger
from pp_free_warmup.errors import UnsupportedSetup, WarmupFailed, WrongCall
from pp_free_warmup.testing import ranks

# One pass runs one microbatch, a real call two.
COLD_THEN_WARM = (1, 4)


@warm_first_call
def module_level_step(training: Any, number: int = 3) -> Any:
    """Take one step."""
    return call(training)


# --- what it looks like -----------------------------------------------------------------------------------------------


def test_name_signature_and_doc_stay():
    """A decorated function introduces itself as before."""
    assert module_level_step.__name__ == "module_level_step"
    assert module_level_step.__qualname__ == "module_level_step"
    assert module_level_step.__module__ == __name__
    assert module_level_step.__doc__ == "Take one step."
    assert str(inspect.signature(module_level_step)) == "(training: 'Any', number: 'int' = 3) -> 'Any'"


def test_a_decorated_schedule_is_still_a_schedule():
    """Name, keywords and doc are Megatron's; other code that inspects it finds what it expects."""
    original = schedules.forward_backward_pipelining_without_interleaving
    schedule = warm_first_call(original)

    assert schedule.__name__ == original.__name__
    assert schedule.__doc__ == original.__doc__
    assert inspect.signature(schedule) == inspect.signature(original)
    assert is_schedule(schedule)


def test_the_handle_says_that_nothing_was_called_yet():
    """Before the first call the report exists, and says so."""
    assert warm_first_call(lambda: None).warmup.report.outcome == "not called"


def test_a_decorated_function_is_pickled_by_name():
    """A process that is spawned finds the decorated function where it is defined, as a plain one."""
    assert pickle.loads(pickle.dumps(module_level_step)) is module_level_step


def test_a_decorated_method_is_pickled_by_name():
    """Of its class, and bound to an object that can be pickled."""
    trainer = pickle.loads(pickle.dumps(Trainer(None).step)).__self__

    assert pickle.loads(pickle.dumps(Trainer.step)) is Trainer.step
    assert trainer.step.warmup is Trainer.step.warmup


ACTOR = """
import os, sys
import cloudpickle
from pipelines import call, pipeline
from pp_free_warmup import warm_first_call

class Actor:
    @warm_first_call(timeout=77)
    def train(self, training): return call(training)

    @classmethod
    @warm_first_call
    def evaluate(cls, training): return call(training, forward_only=True)

    @warm_first_call
    @staticmethod
    def again(training): return call(training)

    one = warm_first_call(Plain())

class Shipped(Actor):
    def counts(self, training): return training.forward_step.counts

sys.stdout.buffer.write(cloudpickle.dumps(Shipped))
""".replace("class Actor:", "class Plain:\n    def __call__(self, training): return call(training)\n\nclass Actor:")


def _shipped() -> bytes:
    """Pickle, in a process of its own, a class that is known there alone: as Ray ships an actor."""
    places = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    made = subprocess.run(
        [sys.executable, "-c", ACTOR],
        env={**os.environ, "PYTHONPATH": places, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        check=True,
    )
    return made.stdout


@pytest.fixture(scope="module")
def shipped() -> bytes:
    """Return a pickled subclass of a class whose methods are decorated."""
    return _shipped()


@ranks(2)
def _works_in_another_process(pickled: bytes) -> None:
    kind = pickle.loads(pickled)
    actor, training = kind(), pipeline()
    assert kind.train.warmup.report.outcome == "not called"
    assert kind.train.warmup._options.timeout == 77

    actor.train(training)
    actor.evaluate(training)
    actor.train(training)
    actor.again(training)
    actor.one(training)

    assert actor.counts(training) == (2, 10)
    assert actor.train.warmup is kind.train.warmup
    assert [report.outcome for report in actor.train.warmup.reports] == ["warmed"]
    assert [report.outcome for report in actor.evaluate.warmup.reports] == ["warmed"]


def test_a_class_that_is_sent_by_value_warms_where_it_arrives(shipped):
    """Decorated methods of a class that only its sender knows are warmed once in the processes that get it."""
    _works_in_another_process(shipped)


def test_a_callable_object_that_is_decorated_can_be_sent():
    """It arrives decorated, with the same options and a handle of its own."""
    step = pickle.loads(pickle.dumps(warm_first_call(Keeper(None), timeout=5)))

    assert isinstance(step, Keeper)
    assert step.warmup._options.timeout == 5


def _in_a_spawned_process(step: Any, answers: Any) -> None:
    answers.put((step.__name__, step.warmup.report.outcome))


def test_a_process_that_is_spawned_gets_the_decorated_function():
    """The function is an argument of the new process, and carries a handle there."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=_in_a_spawned_process, args=(module_level_step, answers))
    process.start()
    process.join(120)

    assert process.exitcode == 0
    assert answers.get() == ("module_level_step", "not called")


def test_what_names_a_model_cannot_be_sent():
    """A model of this process means nothing in another one: said by name, where it is sent."""
    step = warm_first_call(Keeper(None), model=torch.nn.Linear(1, 1))

    with pytest.raises(UnsupportedSetup, match="cannot be sent to another process"):
        pickle.dumps(step.warmup)


def test_a_copied_decorated_function_is_itself():
    """Like a plain function, it is not copied with the object that holds it."""
    held = {"step": module_level_step}

    assert copy.deepcopy(held)["step"] is module_level_step
    assert copy.copy(module_level_step) is module_level_step


def test_what_counts_as_a_schedule():
    """Megatron's own three, and functions that require the same six arguments; nothing else."""

    def mine(forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, more=1):
        """Stand for a schedule of the user's own."""

    def optional(forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size=1):
        """Stand for a function that happens to know the names."""

    assert all(
        map(is_schedule, (schedules.forward_backward_no_pipelining, mine, functools.wraps(mine)(lambda **kw: None)))
    )
    assert not any(map(is_schedule, (optional, print, torch.nn.Identity(), type, 3, None, schedules.forward_step)))


# --- what is refused --------------------------------------------------------------------------------------------------


async def _coroutine() -> None:
    """Stand for an async step."""


async def _async_generator() -> Any:
    yield


def _generator() -> Any:
    yield


class AsyncCallable:
    """An object whose call is async."""

    async def __call__(self) -> None:
        """Stand for an async step."""


@pytest.mark.parametrize(
    ("fn", "name", "kind"),
    [
        (_coroutine, "_coroutine", "an async function"),
        (_async_generator, "_async_generator", "an async function"),
        (_generator, "_generator", "a generator function"),
        (functools.partial(_coroutine), "_coroutine", "an async function"),
        (staticmethod(_coroutine), "_coroutine", "an async function"),
        (classmethod(_generator), "_generator", "a generator function"),
        (AsyncCallable(), "<", "an async function"),
        (AsyncCallable, "AsyncCallable", "a class"),
        (property(_generator), "<property", "a property"),
        (3, "3", "a int"),
        ("text", "'text'", "a str"),
    ],
)
def test_what_cannot_be_warmed_is_refused_by_name(fn, name, kind):
    """Where no call could be warmed, decorating fails, and says what was found."""
    with pytest.raises(UnsupportedSetup) as raised:
        warm_first_call(fn)

    assert raised.value.wrong.startswith(f"@warm_first_call cannot warm {name}")
    assert raised.value.found == f"{kind}; expected a plain function, a method or a pipeline schedule."


def test_a_schedule_refuses_positional_arguments():
    """Its own are keyword-only; the error comes before anything runs."""
    with pytest.raises(WrongCall, match="2 positional; expected keywords only"):
        warm_first_call(schedules.forward_backward_no_pipelining)(1, 2)


# --- forms of functions -----------------------------------------------------------------------------------------------


@ranks(2)
def test_a_function_that_fetches_its_schedule_inside():
    """The first call is warmed and runs for real; the second only runs."""
    training = pipeline()

    @warm_first_call
    def step() -> Any:
        return call(training)

    step()
    first = training.forward_step.counts
    step()

    assert first == (1, 2)
    assert training.forward_step.counts == COLD_THEN_WARM
    assert training.forward_step.order == ["pass", "real", "real", "real", "real"]


@ranks(2)
def test_with_parentheses_and_options():
    """The decorator takes the block's keywords."""
    training = pipeline()

    @warm_first_call(channels=None, timeout=60)
    def step() -> Any:
        return call(training)

    step()
    step()

    assert training.forward_step.counts == COLD_THEN_WARM
    assert "channels" not in step.warmup.report.seconds


@ranks(2)
def test_a_function_at_module_level():
    """Decorated at import, before there is any process group."""
    training = pipeline()

    module_level_step(training)
    module_level_step(training)

    assert training.forward_step.counts == COLD_THEN_WARM


@ranks(2)
def test_what_goes_in_and_out_is_untouched():
    """Arguments and the returned value are the very objects, and an error is the very error."""
    training, token, error = pipeline(), object(), ValueError("mine")

    @warm_first_call
    def step(one: Any, *rest: Any, two: Any, **more: Any) -> Any:
        call(training)
        if more["stop"]:
            raise error
        return one, rest, two, more

    assert step(token, token, two=token, stop=False) == (token, (token,), token, {"stop": False})
    with pytest.raises(ValueError, match="mine") as raised:
        step(token, two=token, stop=True)

    assert raised.value is error
    assert training.forward_step.counts == COLD_THEN_WARM


class Trainer:
    """A trainer with steps of every kind."""

    shared: Any = None

    def __init__(self, training: Any) -> None:
        self.training = training

    @warm_first_call
    def step(self, forward_only: bool = False) -> Any:
        """Take one step."""
        return call(self.training, forward_only=forward_only)

    @classmethod
    @warm_first_call
    def class_step(cls, training: Any) -> Any:
        """Take one step of a class, decorated inside."""
        assert cls is Trainer
        return call(training)

    @warm_first_call
    @classmethod
    def step_of_class(cls, training: Any) -> Any:
        """Take one step of a class, decorated outside."""
        assert cls is Trainer
        return call(training)

    @staticmethod
    @warm_first_call
    def static_step(training: Any) -> Any:
        """Take one step of nobody, decorated inside."""
        return call(training)

    @warm_first_call
    @staticmethod
    def step_of_nobody(training: Any) -> Any:
        """Take one step of nobody, decorated outside."""
        return call(training)


@ranks(2)
def test_a_method():
    """A method is warmed once, and its handle is reached through the object and the class."""
    trainer = Trainer(pipeline())

    trainer.step()
    trainer.step()

    assert trainer.training.forward_step.counts == COLD_THEN_WARM
    assert trainer.step.warmup is Trainer.step.warmup
    assert trainer.step.__name__ == "step"
    assert str(inspect.signature(trainer.step)) == "(forward_only: 'bool' = False) -> 'Any'"


@ranks(2)
def test_two_instances_with_two_models():
    """One decorated method of two objects warms each one's model."""
    one, two = Trainer(pipeline()), Trainer(pipeline(seed=2))

    for trainer in (one, two, one, two):
        trainer.step()

    assert one.training.forward_step.counts == COLD_THEN_WARM
    assert two.training.forward_step.counts == COLD_THEN_WARM


@ranks(2)
def test_two_instances_with_one_model():
    """What is warm is the model, whichever object steps it."""
    training = pipeline()

    Trainer(training).step()
    Trainer(training).step()

    assert training.forward_step.counts == COLD_THEN_WARM


@ranks(2)
@pytest.mark.parametrize("name", ["class_step", "step_of_class", "static_step", "step_of_nobody"])
@pytest.mark.parametrize("owner", ["class", "object"])
def test_class_and_static_methods_in_either_order(name, owner):
    """Called on the class or on an object, decorated above or below, each is warmed once."""
    training = pipeline()
    step = getattr(Trainer if owner == "class" else Trainer(None), name)

    step(training)
    step(training)

    assert training.forward_step.counts == COLD_THEN_WARM
    assert step.__doc__.startswith("Take one step of")


@ranks(2)
def test_a_bound_method_that_is_wrapped_later():
    """A trainer's method can be wrapped from outside, on the object."""
    training = pipeline()

    class Plain:
        def step(self) -> Any:
            return call(training)

    trainer = Plain()
    trainer.step = warm_first_call(trainer.step)  # type: ignore[method-assign]
    trainer.step()
    trainer.step()

    assert training.forward_step.counts == COLD_THEN_WARM


@ranks(2)
def test_a_callable_object():
    """An object with ``__call__`` is a function like any other."""
    training = pipeline()

    class Step:
        def __call__(self) -> Any:
            return call(training)

    step = warm_first_call(Step())
    step()
    step()

    assert training.forward_step.counts == COLD_THEN_WARM


@ranks(2)
def test_a_partial_of_a_step():
    """A partial is looked through, and carries the handle."""
    training = pipeline()
    step = warm_first_call(functools.partial(call, training))

    step()
    step()

    assert isinstance(step, functools.partial)
    assert training.forward_step.counts == COLD_THEN_WARM
    assert step.warmup.report.outcome == "warmed"


@ranks(2)
def test_nested_decorators():
    """Two decorators warm once, and both tell what happened."""
    training = pipeline()

    @warm_first_call
    @warm_first_call
    def step() -> Any:
        return call(training)

    step()
    step()

    assert training.forward_step.counts == COLD_THEN_WARM
    assert step.warmup.report is step.__wrapped__.warmup.report
    assert step.warmup.report.outcome == "warmed"


@ranks(2)
def test_a_decorated_function_inside_a_decorated_function():
    """The step and the loop around it are both decorated: still once."""
    training = pipeline()

    @warm_first_call
    def step() -> Any:
        return call(training)

    @warm_first_call
    def loop() -> None:
        step()
        step()

    loop()

    assert training.forward_step.counts == COLD_THEN_WARM
    assert loop.warmup.report.outcome == step.warmup.report.outcome == "warmed"


# --- schedules --------------------------------------------------------------------------------------------------------


@ranks(2)
def test_a_schedule_fetched_before():
    """The bare schedule is warmed at its first call, whoever holds it."""
    training = pipeline()
    schedule = warm_first_call(fetched())

    call(training, schedule)
    call(training, schedule)

    assert training.forward_step.counts == COLD_THEN_WARM
    assert schedule.warmup.report.outcome == "warmed"


@ranks(2)
def test_a_decorated_schedule_inside_a_block():
    """The bare schedule's own wrapper and the armed block warm once, and the block does not complain."""
    training = pipeline()
    schedule = warm_first_call(fetched())

    with pipeline_warmup() as warmup:
        call(training, schedule)
        call(training, schedule)

    assert training.forward_step.counts == COLD_THEN_WARM
    assert warmup.report is schedule.warmup.report


@ranks(2)
def test_a_schedule_fetched_in_a_block_and_decorated():
    """A wrapper of the block's wrapper warms once, in the block and after it."""
    training = pipeline()

    with pipeline_warmup() as warmup:
        schedule = warm_first_call(fetched())
        call(training, schedule)
    call(training, schedule)

    assert training.forward_step.counts == COLD_THEN_WARM
    assert warmup.report.outcome == "warmed"


@ranks(2)
def test_a_decorated_function_inside_a_block():
    """The block and the decorator warm once; both report it."""
    training = pipeline()

    @warm_first_call
    def step() -> Any:
        return call(training)

    with pipeline_warmup() as warmup:
        step()
        step()

    assert training.forward_step.counts == COLD_THEN_WARM
    assert warmup.report is step.warmup.report


def _step_with_a_schedule(training: Any, schedule: Any, more: Any = None) -> Any:
    """Take one step as Megatron's ``train_step`` does: the schedule is an argument."""
    del more
    return call(training, schedule)


@ranks(2)
@pytest.mark.parametrize("form", ["positional", "keyword", "partial of the step", "partial of the schedule"])
def test_a_schedule_passed_as_an_argument(form):
    """A schedule fetched long before is warmed when a decorated step gets it, in whatever way."""
    training, schedule, step = pipeline(), fetched(), warm_first_call(_step_with_a_schedule)
    if form == "partial of the step":
        step = warm_first_call(functools.partial(_step_with_a_schedule, schedule=schedule))
    for _ in range(2):
        if form == "positional":
            step(training, schedule)
        elif form == "keyword":
            step(training, schedule=schedule)
        elif form == "partial of the step":
            step(training)
        else:
            step(training, functools.partial(schedule, seq_length=SMALL.seq))

    assert training.forward_step.counts == COLD_THEN_WARM
    assert step.warmup.report.outcome == "warmed"


@ranks(2)
def test_megatrons_wrapper_for_whole_graphs():
    """FullCudaGraphWrapper is looked through: the schedule inside is warmed, and the wrapper stays itself."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

    training = pipeline()
    wrapper = FullCudaGraphWrapper(fetched(), cuda_graph_warmup_steps=100)
    schedule = warm_first_call(wrapper)
    try:
        call(training, schedule)
        call(training, schedule)
    finally:
        StaticBufferLoader.static_buffers = {"training": [], "validation": []}
        FullCudaGraphWrapper.result = {"training": None, "validation": None}
        FullCudaGraphWrapper.curr_iteration = {"training": 0, "validation": 0}

    assert schedule is wrapper
    assert training.forward_step.counts == COLD_THEN_WARM
    assert schedule.warmup.report.outcome == "warmed"


class Keeper:
    """A wrapper of a schedule, as Megatron has several."""

    def __init__(self, forward_backward_func: Any) -> None:
        self.forward_backward_func = forward_backward_func

    def __call__(self, **keywords: Any) -> Any:
        """Call the schedule."""
        return self.forward_backward_func(**keywords)


@ranks(2)
def test_a_wrapper_of_a_wrapper_as_an_argument():
    """A decorated step finds the schedule inside what it is given, and does not pile up wrappers."""
    training, kept = pipeline(), Keeper(Keeper(fetched()))
    step = warm_first_call(_step_with_a_schedule)

    step(training, kept)
    once = kept.forward_backward_func.forward_backward_func
    step(training, kept)

    assert training.forward_step.counts == COLD_THEN_WARM
    assert kept.forward_backward_func.forward_backward_func is once


@ranks(2)
def test_a_schedule_of_the_users_own():
    """A function with the six required arguments is warmed as a schedule, and then called."""
    training = pipeline()
    schedule = warm_first_call(_own_schedule)

    assert call(training, schedule)[1] == "mine"
    assert call(training, schedule)[1] == "mine"
    assert training.forward_step.counts == COLD_THEN_WARM


def _own_schedule(
    forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, forward_only=False, **more
) -> Any:
    """Call Megatron's schedule and add something."""
    arguments = {name: value for name, value in locals().items() if name != "more"}
    return schedules.forward_backward_pipelining_without_interleaving(**arguments, **more), "mine"


@ranks(2)
def test_virtual_stages():
    """Each of a rank's two chunks runs once in the pass, whichever door is used."""
    training = pipeline(VIRTUAL)
    schedule = warm_first_call(fetched())

    call(training, schedule)
    call(training, schedule)

    assert training.forward_step.counts == (2, 8)


# --- once per model and kind ------------------------------------------------------------------------------------------


@ranks(2)
def test_each_kind_of_call_is_warmed_once():
    """Log-probs first, then training: both are warmed, neither twice."""
    trainer = Trainer(pipeline())

    kinds = []
    for forward_only in (True, False, True, False):
        trainer.step(forward_only)
        kinds.append((trainer.step.warmup.report.kind, trainer.training.forward_step.passes))

    assert kinds == [(FORWARD_ONLY, 1), (TRAINING, 2), (TRAINING, 2), (TRAINING, 2)]


@ranks(2)
def test_a_rerun_of_the_same_step():
    """The same step with the same batches, run again, is not warmed again."""
    training = pipeline()
    items = [next(training.iterators[0]) for _ in range(2)]
    step = warm_first_call(call)

    losses = [step(training, data_iterator=iter(items)) for _ in range(2)]

    assert training.forward_step.counts == COLD_THEN_WARM
    assert len(losses[0]) == len(losses[1])


@ranks(2)
def test_two_models_with_pipelines_of_their_own():
    """A model that runs in another pipeline of the same ranks, given as groups, is warmed there."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    one, two = pipeline(), pipeline(seed=2)
    group = dist.new_group([0, 1])
    collection = ProcessGroupCollection.use_mpu_process_groups()
    collection.pp = group
    collection.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    groups = {"p2p_communicator": P2PCommunicator(group, two.config), "pg_collection": collection}
    step = warm_first_call(call)

    for _ in range(2):
        step(one)
        step(two, **groups)

    assert one.forward_step.counts == COLD_THEN_WARM
    assert two.forward_step.counts == COLD_THEN_WARM
    assert [report.outcome for report in step.warmup.reports] == ["warmed", "warmed"]


@ranks(2)
def test_only_the_named_model_is_warmed():
    """Reference and critic run untouched inside a step that was decorated for the actor."""
    actor, critic = pipeline(), pipeline(seed=2)

    @warm_first_call(model=actor.chunks)
    def step() -> None:
        call(critic, forward_only=True)
        call(actor)

    step()
    step()

    assert actor.forward_step.counts == COLD_THEN_WARM
    assert critic.forward_step.counts == (0, 4)


@ranks(2)
def test_a_schedule_called_inside_the_pass_is_left_alone():
    """A forward step that calls another model's schedule does not warm that model inside the pass."""
    inner = pipeline(seed=2)
    training = pipeline(also=lambda: call(inner, forward_only=True) if in_warmup() else None)
    step = warm_first_call(call)

    step(training)
    inside = inner.forward_step.order.copy()
    step(training)
    step(inner, forward_only=True)

    assert inside == ["pass", "pass"]
    assert training.forward_step.counts == COLD_THEN_WARM
    assert inner.forward_step.order[2:] == ["pass", "real", "real"]


class Teacher(torch.nn.Module):
    """A whole small model on each rank, whose schedule has no pipeline."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model_type = None
        self.linear = torch.nn.Linear(2, 2)
        self.calls = 0

    def set_input_tensor(self, tensor: Any) -> None:
        """Ignore what the schedule passes on."""

    def forward_step(self, iterator: Any, chunk: Any) -> Any:
        """Run the teacher."""
        self.calls += 1
        return chunk.linear(torch.ones(2)), lambda output: (output.sum(), {"teacher": output.sum().detach()})


@ranks(2)
def test_a_local_teacher_inside_every_forward_step():
    """A schedule without a pipeline, called by one stage while the other waits, is never warmed."""
    told: list[Any] = []
    training = pipeline(also=lambda: told.append(_ask(teacher)))
    teacher = Teacher(training.config)
    step = warm_first_call(call)

    step(training)
    step(training)

    assert training.forward_step.counts == COLD_THEN_WARM
    assert teacher.calls == len(told) == 4  # the pass asked it as well, and left no trace of that either


def _ask(teacher: Teacher) -> Any:
    with torch.no_grad():
        return schedules.forward_backward_no_pipelining(
            forward_step_func=teacher.forward_step,
            data_iterator=None,
            model=teacher,
            num_microbatches=1,
            seq_length=1,
            micro_batch_size=1,
            forward_only=True,
        )


@ranks(2)
def test_a_step_that_calls_itself():
    """A decorated step that steps a second model through itself warms both, once each."""
    models = [pipeline(), pipeline(seed=2)]

    @warm_first_call
    def step(number: int) -> None:
        call(models[number])
        if number == 0:
            step(1)

    step(0)
    step(0)

    assert [training.forward_step.counts for training in models] == [COLD_THEN_WARM, COLD_THEN_WARM]


# --- switching it on and off ------------------------------------------------------------------------------------------


@ranks(2)
def test_enabled_is_asked_until_the_kind_is_warm():
    """While the callable says no the kind stays open; after the warmup nobody asks any more."""
    training, answers = pipeline(), []

    def enabled() -> bool:
        answers.append(len(answers) >= 2)
        return answers[-1]

    step = warm_first_call(call, enabled=enabled)
    passes = []
    for _ in range(5):
        step(training)
        passes.append(training.forward_step.passes)

    assert passes[0] == 0
    assert passes[-1] == 1
    assert len(answers) < 8
    assert training.forward_step.counts == (1, 10)


@ranks(2)
def test_disabled_for_good():
    """``enabled=False`` runs every call untouched."""
    training = pipeline()
    step = warm_first_call(call, enabled=False)

    step(training)
    step(training)

    assert training.forward_step.counts == (0, 4)
    assert step.warmup.report.outcome == "skipped"


@ranks(2)
def test_switched_off_by_the_environment():
    """PP_FREE_WARMUP=0 switches off what the program switched on, and leaves the kind open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PP_FREE_WARMUP", "0")
        training = pipeline()
        step = warm_first_call(call)
        step(training)
        off = training.forward_step.counts
    step(training)

    assert off == (0, 2)
    assert training.forward_step.counts == COLD_THEN_WARM


@ranks(2)
def test_switched_off_on_one_rank_only():
    """One rank alone cannot warm up: no rank does, the reason names it, and the run goes on."""
    training = pipeline()
    step = warm_first_call(call, enabled=dist.get_rank() == 0)

    step(training)
    step(training)

    assert training.forward_step.counts == (0, 4)
    assert step.warmup.report.reason == "rank 1: switched off"


@ranks(1)
def test_a_pipeline_of_one_stage():
    """There is nothing to overlap: calls run untouched, and the report says why."""
    from dataclasses import replace

    training = pipeline(replace(SMALL, pp=1))
    step = warm_first_call(call)

    step(training)
    step(training)

    assert training.forward_step.counts == (0, 4)
    assert [report.reason for report in step.warmup.reports] == ["the schedule has no pipeline"]


@ranks(1)
def test_a_pipeline_schedule_over_one_stage():
    """A schedule that is asked to pipeline over one stage is left alone too."""
    from dataclasses import replace

    training = pipeline(replace(SMALL, pp=1))
    step = warm_first_call(schedules.forward_backward_pipelining_without_interleaving)

    call(training, step)

    assert training.forward_step.counts == (0, 2)
    assert step.warmup.report.reason == "the pipeline has one stage"


# --- reports ----------------------------------------------------------------------------------------------------------


@ranks(2)
def test_the_report_of_a_decorated_function():
    """Outcome, kind, this rank's phases and both stages', as text and as a dictionary."""
    training = pipeline()
    step = warm_first_call(call)
    step(training)
    report = step.warmup.report

    assert (report.outcome, report.kind, report.reason) == ("warmed", TRAINING, "")
    assert {"save", "agree", "forward[0]", "backward[0]", "pass", "restore", "channels"} <= set(report.seconds)
    assert [stage.stage for stage in report.stages] == [0, 1]
    assert all(stage.most["forward[0]"] >= stage.least["forward[0]"] > 0 for stage in report.stages)
    assert report.total_s >= report.seconds["pass"]
    assert str(report).startswith("pp_free_warmup: training warmed in ")
    assert report.to_dict()["stages"][1]["stage"] == 1


@ranks(2)
def test_a_warm_call_adds_no_report():
    """Reports are about warmups: later calls leave the last one in place."""
    training = pipeline()
    step = warm_first_call(call)
    step(training)
    report = step.warmup.report
    step(training)

    assert step.warmup.reports == [report]


@ranks(2)
def test_a_step_without_a_schedule_is_told_once():
    """A decorated function that called no schedule says so at the user's line, once, with what to do."""
    step = warm_first_call(lambda: "done")

    with pytest.warns(RuntimeWarning, match=r"warm_first_call\(forward_backward_func\)") as caught:
        assert step() == "done"
    assert step() == "done"

    assert caught[0].filename == __file__
    assert len(caught) == 1


# --- errors -----------------------------------------------------------------------------------------------------------


@ranks(2)
def test_an_error_in_the_pass_closes_the_kind():
    """The first call raises on both ranks; the next one runs, unwarmed, and the error is kept as text."""

    def fail() -> None:
        if in_warmup() and dist.get_rank() == 1:
            raise ValueError("no such kernel")

    training = pipeline(also=fail)
    step = warm_first_call(call, on_failure="raise")
    with pytest.raises(WarmupFailed, match="rank 1: ValueError: no such kernel") as raised:
        step(training)
    step(training)

    page = ledger.page(training.chunks[0], TRAINING)
    assert page.warm is False
    assert page.reason == step.warmup.report.reason
    assert page.reason.startswith("WarmupFailed: The warmup of the pipeline failed and was undone. rank 1: ValueError")
    assert isinstance(raised.value.__cause__, ValueError if dist.get_rank() == 1 else type(None))
    assert training.forward_step.counts == (1, 2)


@ranks(2)
def test_an_error_in_the_real_step_leaves_the_kind_warm():
    """What fails after the warmup is the user's own error, and the next call is warm."""
    training = pipeline()
    with pytest.raises(ValueError, match="bad batch"):
        call(training, warm_first_call(_fails))
    call(training, warm_first_call(fetched()))

    assert ledger.page(training.chunks[0], TRAINING).warm
    assert training.forward_step.counts == (1, 2)


@ranks(2)
def test_an_error_keeps_no_model_alive():
    """After a failed warmup and its handling, dropping the model frees it."""

    def fail() -> None:
        raise ValueError("no such kernel")

    training = pipeline(also=fail)
    step = warm_first_call(call, on_failure="raise")
    with pytest.raises(WarmupFailed):
        step(training)
    gone = weakref.ref(training.chunks[0])

    del training
    gc.collect()

    assert gone() is None
    assert step.warmup.report.outcome == "failed"


@ranks(2)
def test_another_kind_stays_open_after_an_error():
    """A failed training warmup says nothing about forward-only calls."""

    def fail() -> None:
        if in_warmup() and not forward_only:
            raise ValueError("no such kernel")

    forward_only = False
    training = pipeline(also=fail)
    step = warm_first_call(call, on_failure="raise")
    with pytest.raises(WarmupFailed):
        step(training)
    forward_only = True
    step(training, forward_only=True)

    assert step.warmup.report.outcome == "warmed"
    assert step.warmup.report.kind == FORWARD_ONLY


# --- threads ----------------------------------------------------------------------------------------------------------


def _in_a_thread(act: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def body() -> None:
        try:
            results.append(act())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            results.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, results


def _looks(*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, **more) -> Any:
    """Stand for a schedule that only looks at the state in which it is called."""
    return in_warmup(), float(torch.rand(())), model.config.timers


@ranks(2)
@pytest.mark.parametrize("warm_before", [False, True])
def test_a_second_thread_waits_until_everything_is_put_back(warm_before):
    """A call in another thread runs after the restore, whether its own kind was warm before or not."""
    started = Witness()
    training = pipeline(also=lambda: len(started) or started.append(_in_a_thread(lambda: call(training, second))))
    training.config.timers = None
    second, kind = warm_first_call(_looks), {"forward_only": False}
    if warm_before:
        training.forward_step.also, also = None, training.forward_step.also
        call(training, warm_first_call(fetched()))
        training.forward_step.also = also
        kind = {"forward_only": True}
    torch.manual_seed(7)
    expected = float(torch.rand(()))
    torch.manual_seed(7)
    call(training, warm_first_call(_stay_away), **kind)
    thread, results = started.notes[0]
    thread.join(30)

    assert results == [(False, expected, None)]


def _fails(*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, **more) -> Any:
    """Stand for a schedule in which every rank fails."""
    raise ValueError("bad batch")


def _stay_away(
    *, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, **more
) -> str:
    """Stand for a schedule that draws no random numbers, so that the other thread's are the first."""
    return "called"


@ranks(2)
def test_a_second_thread_does_not_wait_for_ever():
    """A thread whose patience ends gets a named error instead of the warmup's state."""
    started = Witness()

    def start_and_wait() -> None:
        if in_warmup():
            started.append(_in_a_thread(lambda: call(training, warm_first_call(_looks, timeout=0.1))))
            started.notes[0][0].join(30)

    training = pipeline(also=start_and_wait)
    call(training, warm_first_call(fetched()))

    assert isinstance(started.notes[0][1][0], WarmupFailed)
    assert started.notes[0][1][0].wrong == "Another thread of this process is still warming a pipeline."
