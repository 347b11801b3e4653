"""The one rule: whatever lies in a field or a container, however deep, is the same object there afterwards."""

from __future__ import annotations

import argparse
import functools
import queue
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.transformer import TransformerConfig

from pp_free_warmup._reach import DEPTH, Walk
from pp_free_warmup._structure import Kept, structure_kept

few = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


class Slotted:
    """Keeps what it has in slots, one of them of a base class."""

    __slots__ = ("first", "second")


class Hostile:
    """Has an ``==``, properties and attributes that nobody may ask."""

    def __init__(self, *held):
        self.held = list(held)

    __hash__ = object.__hash__

    def __eq__(self, other):
        raise AssertionError

    def __getattr__(self, name):
        raise AssertionError(name)

    @property
    def computed(self):
        """Be asked."""
        raise AssertionError


def _plain(*held):
    return SimpleNamespace(held=list(held), number=1)


def _slotted(*held):
    made = Slotted()
    made.first = list(held)
    return made


def _with_module(*held):
    made = torch.nn.Linear(1, 1)
    made.held = held
    return made


MAKERS = (
    lambda *held: list(held),
    lambda *held: dict(enumerate(held)),
    lambda *held: OrderedDict(enumerate(held)),
    lambda *held: defaultdict(list, enumerate(held)),
    lambda *held: deque(held, maxlen=9),
    lambda *held: tuple(held),
    lambda *held: Counter(len(held) * ["a"]),
    lambda *held: set(range(len(held))),
    _plain,
    _slotted,
    _with_module,
    Hostile,
)
leaves = st.sampled_from([1, "a", None, torch.ones(1), print])
trees = st.recursive(
    leaves,
    lambda inner: st.builds(lambda make, held: make(*held), st.sampled_from(MAKERS), st.lists(inner, max_size=4)),
    max_leaves=12,
)


def shape(value, seen=None):
    """Write down what lies where, by identity, far enough for the trees of these tests."""
    seen = {} if seen is None else seen
    if id(value) in seen or isinstance(value, torch.Tensor):
        return id(value)
    seen[id(value)] = value
    inside = [(id(key), shape(item, seen)) for key, item in value.items()] if isinstance(value, dict) else []
    if isinstance(value, list | tuple | deque):
        inside = [shape(item, seen) for item in value]
    elif isinstance(value, set):
        inside = sorted(map(id, value))
    elif isinstance(value, Slotted):
        inside = [shape(getattr(value, name, None), seen) for name in Slotted.__slots__]
    elif isinstance(value, SimpleNamespace | Hostile | torch.nn.Module):
        inside = shape(vars(value), seen)
    return id(value), inside


def disturb(value, seen=None):
    """Change everything that can be changed, from the leaves up, and add something to each."""
    seen = {} if seen is None else seen
    if id(value) in seen or isinstance(value, torch.Tensor):
        return
    seen[id(value)] = value
    fields = vars(value) if isinstance(value, SimpleNamespace | Hostile | torch.nn.Module) else {}
    slots = [getattr(value, name, None) for name in Slotted.__slots__] if isinstance(value, Slotted) else []
    inside = list(value.values()) if isinstance(value, dict) else [*fields.values(), *slots]
    for item in list(value) if isinstance(value, list | tuple | deque) else inside:
        disturb(item, seen)
    if isinstance(value, dict | set):
        value.clear()
        value.update({"new": 1})
    elif isinstance(value, list | deque):
        value.reverse()
        value.append("new")
    elif isinstance(value, Slotted):
        value.first, value.second = "new", "new"
    elif fields:
        fields.pop("held", None)
        fields["added"] = "new"


@few
@given(tree=trees, more=trees)
def test_whatever_hangs_on_a_module_comes_back(tree, more):
    """Nested, shared and self-containing structures of every kind that can be changed."""
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    module.tree, module[0].shared = tree, [tree, more]
    module.ring = [module]
    module.ring.append(module.ring)
    before = shape(module)
    with structure_kept(module):
        disturb([tree, more, module[0].shared, module.ring])
        module.tree = None
        module.add = torch.nn.Linear(1, 1)
        assert shape(module) != before

    assert shape(module) == before


@few
@given(tree=trees)
def test_what_comes_back_comes_back_when_the_block_raises(tree):
    """And the error comes out."""
    owner = SimpleNamespace(tree=tree)
    before = shape(owner)
    with pytest.raises(KeyError), structure_kept(owner):
        disturb(owner)
        raise KeyError

    assert shape(owner) == before


@few
@given(tree=trees, more=trees)
def test_what_comes_back_may_be_nested(tree, more):
    """Each level puts back what it found, what was added since the outer one began included."""
    owner = SimpleNamespace(tree=tree)
    before = shape(owner)
    with structure_kept(owner):
        owner.tree, owner.more = [more, tree], tree
        between = shape(owner)
        with structure_kept(owner):
            disturb(owner)
        assert shape(owner) == between

    assert shape(owner) == before


@few
@given(tree=trees)
def test_nothing_is_written_where_nothing_changed(tree):
    """To look is no change, and to put back what is there already is none either."""
    owner = SimpleNamespace(tree=tree)
    before = shape(owner)
    with structure_kept(owner):
        assert shape(owner) == before
    assert shape(owner) == before


# --- modules ---


class Lazy(torch.nn.Module):
    """Makes a submodule, a buffer, a hook, a cache and a flag in its first forward, as models do."""

    def __init__(self):
        super().__init__()
        self.ready = False

    def forward(self, x):
        if not self.ready:
            self.inner = torch.nn.Linear(1, 1)
            self.register_buffer("table", torch.arange(len(x)), persistent=False)
            self.register_forward_hook(lambda *_: None)
            self.longest = len(x)
            self.ready = True
        return self.inner(x)


def test_what_a_first_forward_makes_is_made_again():
    """Submodules, buffers, hooks and flags; a table is never kept beside the field that says how long it is."""
    model = Lazy()
    before = {name: id(value) for name, value in vars(model).items()}
    with structure_kept(model):
        model(torch.ones(2, 1))

    assert {name: id(value) for name, value in vars(model).items()} == before
    assert (len(model._modules), len(model._buffers), len(model._forward_hooks), model.ready) == (0, 0, 0, False)
    assert model._non_persistent_buffers_set == set()


def test_a_module_that_changes_its_class_has_its_own_again():
    """As lazy modules do in their first forward."""
    model = torch.nn.LazyLinear(1)
    with structure_kept(model):
        model.__class__ = torch.nn.Linear

    assert type(model) is torch.nn.LazyLinear


def test_a_module_that_nobody_registers_is_kept_too():
    """One in a tuple or in an object, as Transformer Engine's fused forms are."""
    hidden, behind = Lazy(), Lazy()
    model = torch.nn.Linear(1, 1)
    model.fused, model.kit = (hidden,), SimpleNamespace(module=behind)
    with structure_kept(model):
        hidden(torch.ones(1, 1))
        behind(torch.ones(1, 1))

    assert (hidden.ready, behind.ready) == (False, False)


def test_what_a_compiler_notes_stays():
    """Code that was compiled in the block stays compiled, and so does what was noted of it."""
    model = torch.nn.Linear(1, 1)
    with structure_kept(model):
        model.weight._dynamo_static = True
        model.weight.other = True

    assert vars(model.weight) == {"_dynamo_static": True}


def test_nothing_is_compiled_twice():
    """A compiled model finds its code again after its fields were put back."""
    model, compiled = Lazy(), []
    model.inner, model.ready = torch.nn.Linear(1, 1), True

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph.forward

    run = torch.compile(model, backend=backend)
    with structure_kept(run):
        run(torch.ones(2, 1))
        model.longest = 2
    run(torch.ones(2, 1))
    torch._dynamo.reset()

    assert len(compiled) == 1


def test_a_thread_that_reads_a_config_finds_every_field():
    """Put back while it looks, Megatron's config is never half empty, whatever the block added and changed."""
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    names, stop, missing = list(vars(config)), threading.Event(), []

    def read():
        while not stop.is_set():
            missing.extend(name for name in names if name not in vars(config))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(500):
        with structure_kept(config):
            vars(config).update(dict.fromkeys(names[::2], number))
            config.added = number
    stop.set()
    reader.join()

    assert missing == []
    assert (list(vars(config)), config.timers) == (names, None)


@pytest.mark.parametrize(
    "kind", [torch.cuda.Stream, torch.distributed.ProcessGroup, type, functools.partial, torch.optim.Optimizer]
)
def test_what_is_no_plain_object_is_left_alone(kind):
    """Streams, groups, classes, functions and optimizers are known by identity."""
    value = kind.__new__(kind) if kind is torch.optim.Optimizer else kind
    assert Walk().from_model([value]).fields == []


def test_a_plain_namespace_and_a_queue_are_no_foreign_objects():
    """Those of the standard library hold state like one's own."""
    holder = SimpleNamespace(arguments=argparse.Namespace(step=1), waiting=queue.Queue())
    with structure_kept(holder):
        holder.arguments.step = 2
        holder.waiting.put(1)

    assert (holder.arguments.step, list(holder.waiting.queue)) == (1, [])
    assert holder.waiting.unfinished_tasks == 0


def test_a_walk_ends():
    """After so many links, in whatever is linked: what lies deeper is left as the block leaves it."""
    chain = []
    for _ in range(3 * DEPTH):
        chain = [chain]
    assert len(Walk().from_model([chain]).containers) == DEPTH + 1


# --- what a forward step holds ---


def kept(step):
    """Return what the rule keeps of a forward step."""
    return Kept(Walk().from_step([step]))


class Trainer:
    """Counts, collects and caches, as trainers' objects do."""

    def __init__(self):
        self.tokens, self.routes, self.stats = 0, [], SimpleNamespace(flops=0.0)

    def step(self, by=1):
        """Do all of it."""
        self.tokens += by
        self.routes.append(by)
        self.stats.flops += by
        self.novel = by

    __call__ = step

    @staticmethod
    def closing():
        """Return a function that counts in its closure, and the function that tells."""
        count, seen = 0, []

        def step(by=1):
            nonlocal count
            count += by
            seen.append(by)

        return step, lambda: (count, seen)


def _told(trainer):
    return trainer.tokens, trainer.routes, trainer.stats.flops, hasattr(trainer, "novel")


OWNED = {
    "method": lambda trainer: trainer.step,
    "object": lambda trainer: trainer,
    "partial": lambda trainer: functools.partial(trainer.step, by=2),
    "argument": lambda trainer: functools.partial(Trainer.step, trainer),
    "wrapped": lambda trainer: functools.wraps(trainer.step)(lambda: trainer.step()),
    "keyword": lambda trainer: functools.partial(lambda inner: inner(), inner=trainer.step),
}


@pytest.mark.parametrize("kind", OWNED)
def test_the_owner_of_a_forward_step_is_as_before(kind):
    """Its fields, what its containers hold, what hangs on it: through a method, a call, a partial, a wrapper."""
    trainer = Trainer()
    step = OWNED[kind](trainer)
    before = kept(step)
    step()
    before.put_back()

    assert _told(trainer) == (0, [], 0.0, False)


def test_a_closure_is_as_before():
    """Its variables are bound as they were, and the containers in them hold what they held."""
    step, told = Trainer.closing()
    before = kept(step)
    step()
    assert told() == (1, [1])
    before.put_back()

    assert told() == (0, [])


COUNTED, LISTED = 0, []


def _counting(seen=[]):  # noqa: B006 - the mutable default is the subject
    global COUNTED  # noqa: PLW0603 - so is the global
    COUNTED += 1
    LISTED.append(1)
    seen.append(1)
    _counting.calls = getattr(_counting, "calls", 0) + 1
    return seen


def test_globals_defaults_and_attributes_of_a_function_are_as_before():
    """Those that its code names; a counter that is a global variable too."""
    before = kept(lambda: _counting())
    seen = _counting()
    before.put_back()

    assert (COUNTED, LISTED, seen, vars(_counting)) == (0, [], [], {})


def test_something_new_that_is_no_data_stays_with_its_owner():
    """A pool, a group or a stream that the block made is not made twice; a new counter or list goes."""
    trainer, pool = Trainer(), object()
    before = kept(trainer.step)
    trainer.pool, trainer.seen, trainer.calls = pool, [1], 1
    before.put_back()

    assert trainer.pool is pool
    assert not hasattr(trainer, "seen")
    assert not hasattr(trainer, "calls")


def test_what_a_fetch_changes_stays_changed():
    """It happens once, and the fetched batch is served again: counters that a generator keeps on its trainer."""
    trainer = Trainer()
    trainer.loader = SimpleNamespace(epoch=0, seen=[0])
    before = kept(trainer.step)
    trainer.step()
    with before.as_caller():
        trainer.loader.epoch = 1
        trainer.loader.seen.append(1)
    trainer.step()
    before.put_back()

    assert (trainer.loader.epoch, trainer.loader.seen) == (1, [0, 1])
    assert _told(trainer) == (0, [], 0.0, False)


@pytest.mark.parametrize(
    "worker", [threading.Thread(), queue.Queue(), ThreadPoolExecutor(1)], ids=lambda it: type(it).__name__
)
def test_what_other_threads_fill_is_left_to_them(worker):
    """An owner with a thread or a queue has its counters back; containers keep what was put in meanwhile."""
    trainer = Trainer()
    trainer.worker, trainer.waiting = worker, queue.Queue()
    before = kept(trainer.step)
    trainer.step()
    trainer.waiting.put("batch")
    before.put_back()

    assert trainer.tokens == 0
    assert trainer.routes == [1]
    assert list(trainer.waiting.queue) == ["batch"]


def test_an_engine_of_two_hundred_fields_is_no_burden():
    """Only what can be changed is looked into, and a model is not copied."""
    engine = SimpleNamespace(**{f"field_{number}": number for number in range(200)})
    engine.weights = [torch.nn.Linear(512, 512)]
    before = Walk().from_step([functools.partial(print, engine)])

    assert len(before.fields) <= 6


class Engine:
    """A trainer that steps and zeroes gradients, as an optimizer does, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def step(self) -> None:
        """Count."""
        self.calls += 1

    def zero_grad(self) -> None:
        """Do nothing."""


def test_a_trainer_that_steps_is_no_optimizer():
    """Only what has parameter groups, or is one of torch's, is left alone."""
    engine = Engine()
    with structure_kept([engine]):
        engine.step()

    assert engine.calls == 0
