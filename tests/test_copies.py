"""Copies of batches: nothing written to the copy reaches the original, and all else is alike."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import threading
import types
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pp_free_warmup._copies import copy_of_batch
from pp_free_warmup.errors import UnsupportedSetup

Pair = namedtuple("Pair", ["first", "second"])  # noqa: PYI024 - the untyped form is what batches hold


@dataclasses.dataclass
class Packed:
    """A batch part as Megatron's PackedSeqParams is one: tensors, numbers, a process group."""

    lengths: Any
    group: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A batch part that refuses assignment."""

    tokens: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    """A batch part without a ``__dict__``."""

    tokens: Any
    late: Any = dataclasses.field(init=False)


class Cloning:
    """A batch part that knows how to copy itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def clone(self) -> Cloning:
        """Copy as tensors and TensorDicts do."""
        return Cloning(self.tensor.clone())


class Tagged(torch.Tensor):
    """A tensor of a class of its own."""


def _tensors_in(item: Any) -> list[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        return [item]
    if isinstance(item, dict | UserDict):
        return [tensor for value in item.values() for tensor in _tensors_in(value)]
    if isinstance(item, list | tuple):
        return [tensor for value in item for tensor in _tensors_in(value)]
    if dataclasses.is_dataclass(item):
        return [tensor for f in dataclasses.fields(item) for tensor in _tensors_in(getattr(item, f.name, None))]
    return []


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_pinned()


def _aliases(tensors: list[torch.Tensor]) -> list[list[int | None]]:
    """Say for each two tensors how many bytes their beginnings are apart in one storage, or None."""
    return [
        [
            one.data_ptr() - two.data_ptr()
            if one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr() and one.numel() and two.numel()
            else None
            for two in tensors
        ]
        for one in tensors
    ]


# --- structures that are copied ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda t: {"tokens": t}, id="dict"),
        pytest.param(lambda t: OrderedDict(tokens=t), id="OrderedDict"),
        pytest.param(lambda t: defaultdict(list, tokens=t), id="defaultdict"),
        pytest.param(lambda t: UserDict(tokens=t), id="UserDict"),
        pytest.param(lambda t: [t, [t, 3]], id="list"),
        pytest.param(lambda t: (t, "text"), id="tuple"),
        pytest.param(lambda t: Pair(t, None), id="namedtuple"),
        pytest.param(lambda t: Packed(t, "group"), id="dataclass"),
        pytest.param(Frozen, id="frozen dataclass"),
        pytest.param(Slotted, id="slotted dataclass"),
        pytest.param(lambda t: {"deep": [(Pair(Packed(t), {"x": Frozen(t)}),)]}, id="nested"),
    ],
)
def test_writing_to_the_copy_leaves_the_original(make):
    """Every known structure comes back as its own class, with equal tensors of its own."""
    batch = make(torch.arange(4.0))

    twin = copy_of_batch(batch)
    values = [tensor.tolist() for tensor in _tensors_in(twin)]
    for tensor in _tensors_in(twin):
        tensor.fill_(-1)

    assert type(twin) is type(batch)
    assert twin is not batch
    assert values == [tensor.tolist() for tensor in _tensors_in(batch)]
    assert values != []


def test_containers_are_not_shared():
    """Adding a key to the copy, or an item to its list, does not reach the original."""
    batch = {"a": [1, 2], "b": {"c": 3}}

    twin = copy_of_batch(batch)
    twin["a"].append(3)
    twin["b"]["d"] = 4
    twin["e"] = 5

    assert batch == {"a": [1, 2], "b": {"c": 3}}


def test_a_defaultdict_keeps_its_factory():
    """What a subclass of dict needs beyond its items comes along."""
    twin = copy_of_batch(defaultdict(list))

    assert twin["new"] == []


def test_an_object_that_clones_itself_is_cloned():
    """Objects with ``clone()``, such as TensorDicts, are asked to copy themselves."""
    batch = Cloning(torch.ones(2))

    copy_of_batch({"part": batch})["part"].tensor.zero_()

    assert batch.tensor.tolist() == [1, 1]


class Sample:
    """A batch part as a plain class."""

    def __init__(self, tokens: Any, **more: Any) -> None:
        self.tokens = tokens
        vars(self).update(more)


class Slots:
    """A plain class without a ``__dict__``."""

    __slots__ = ("tokens",)

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens


class Attributes(dict):
    """A dict whose keys are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Tagging(list):
    """A list that has something of its own beside its items."""

    tokens: Any = None


def _tagging(tokens: torch.Tensor) -> Tagging:
    made = Tagging()
    made.tokens = tokens
    return made


class Child(Sample):
    """A plain class that refuses assignment, as frozen ones do."""

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name):
            raise AttributeError(name)
        super().__setattr__(name, value)


@pytest.mark.parametrize(
    "make",
    [
        Sample,
        Slots,
        _tagging,
        Child,
        lambda tokens: Attributes(tokens=tokens),
        lambda tokens: types.SimpleNamespace(tokens=tokens),
        Frozen,
        lambda tokens: Sample(tokens, inner=[Sample(tokens)], hook=len),
    ],
)
@pytest.mark.parametrize("tokens", [torch.zeros(2), np.zeros(2)], ids=["torch", "numpy"])
def test_fields_of_any_object_are_copied(make, tokens):
    """What is written through a field of the copy, or to the field itself, stays with the copy."""
    batch = make(tokens)

    twin = copy_of_batch([batch])[0]
    twin.tokens[:] = 1
    object.__setattr__(twin, "tokens", None)

    assert type(twin) is type(batch)
    assert batch.tokens is tokens
    assert tokens.tolist() == [0, 0]


def test_keys_that_are_attributes_stay_so():
    """Written by key, read as an attribute, in the copy as in the original."""
    twin = copy_of_batch(Attributes(tokens=torch.zeros(1)))
    twin["tokens"] = 3

    assert twin.tokens == 3


def test_objects_in_a_plain_object_stay_the_same_one():
    """An object that leads back to itself does so in the copy."""
    batch = Sample(torch.zeros(1))
    batch.me, batch.parts = batch, [batch]

    twin = copy_of_batch(batch)

    assert twin.me is twin.parts[0] is twin
    assert twin is not batch


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(torch.nn.Linear(1, 1), id="module"),
        pytest.param(Sample(None, model=[torch.nn.Linear(1, 1)]), id="trainer"),
        pytest.param(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), id="optimizer"),
        pytest.param(torch.Generator(), id="generator"),
        pytest.param(threading.Lock(), id="lock"),
        pytest.param(threading.Thread(), id="thread"),
        pytest.param(iter([1]), id="iterator"),
        pytest.param(types, id="package"),
        pytest.param(inspect.Parameter.KEYWORD_ONLY, id="enum"),
        pytest.param(functools.partial(print), id="function"),
        pytest.param(torch.float32, id="dtype"),
    ],
)
def test_pieces_of_the_program_are_shared(part):
    """What the process has once, and what leads to a module, is no data."""
    twin = copy_of_batch({"part": part, "sample": Sample(torch.ones(1), group=part if part != "trainer" else None)})

    assert twin["part"] is part


class Refusing(Sample):
    """A class of tensors that cannot be copied."""

    def __reduce__(self) -> Any:
        raise TypeError("never")


def test_an_object_of_tensors_that_cannot_be_copied_is_refused_by_name():
    """It could be edited in place, and the real step would see it."""
    with pytest.raises(UnsupportedSetup, match="cannot be copied") as raised:
        copy_of_batch([Refusing(torch.ones(1))])

    assert "Refusing: TypeError: never" in raised.value.found
    handle = Refusing("no tensor")
    assert copy_of_batch([handle])[0] is handle


def test_other_containers_are_copied():
    """Sets, deques, byte arrays and arrays of objects are the copy's own, in their form."""
    tokens = torch.zeros(1)
    objects = np.array([tokens, "a"], dtype=object)
    batch = {"set": {1}, "deque": deque([tokens], maxlen=2), "bytes": bytearray(b"a"), "objects": objects}

    twin = copy_of_batch(batch)
    twin["set"].add(2)
    twin["deque"][0] += 1
    twin["deque"].append(2)
    twin["bytes"].extend(b"b")
    same = twin["objects"][0] is twin["deque"][0]
    twin["objects"][1] = "b"

    assert (batch["set"], list(batch["deque"]), batch["bytes"]) == ({1}, [tokens], b"a")
    assert (tokens.tolist(), objects[1], twin["deque"].maxlen, same) == ([0], "a", 2, True)


def test_an_array_keeps_its_form():
    """Order, strides that a copy can have, class and dtype are the original's."""
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))

    twin = copy_of_batch([array, array[0]])
    twin[0][:] = 0

    assert (twin[0].strides, twin[0].dtype, array.sum()) == (array.strides, array.dtype, 15)


def test_an_inference_tensor_stays_one():
    """Made where no gradient is ever asked for, it is of the same kind in the pass, wherever that runs."""
    with torch.inference_mode():
        tokens = torch.arange(4)
    twin = copy_of_batch([tokens, tokens[1:].clone()])
    with torch.inference_mode():
        inside = copy_of_batch([torch.ones(1), torch.ones(1, requires_grad=True)])
        plain = copy_of_batch([PLAIN])[0]

    assert [one.is_inference() for one in (*twin, *inside, plain)] == [True, False, True, True, False]
    assert twin[0].tolist() == tokens.tolist()


PLAIN = torch.ones(2)


def test_a_jagged_tensor_is_cloned():
    """Ragged samples as verl hands them over: values of the copy's own, the same lengths."""
    values = torch.arange(5.0)
    ragged = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5]))

    twin = copy_of_batch({"ids": ragged})["ids"]
    twin.values().zero_()

    assert twin.shape == ragged.shape
    assert values.tolist() == [0, 1, 2, 3, 4]


def test_a_class_with_clone_is_no_object_to_clone():
    """A class in a batch is shared, although it has an attribute ``clone``."""
    assert copy_of_batch([Cloning, torch.Tensor]) == [Cloning, torch.Tensor]


def test_everything_else_is_shared():
    """A process group, a function or a string in a batch stays the very same object."""
    group, text = object(), "text" * 10

    twin = copy_of_batch(Packed(lengths=[group, text, test_everything_else_is_shared, None], group=group))

    assert twin.group is group
    assert all(a is b for a, b in zip(twin.lengths, [group, text, test_everything_else_is_shared, None], strict=True))


def test_a_field_without_a_value_stays_without():
    """A dataclass field that was never set is not invented."""
    twin = copy_of_batch(Slotted(torch.ones(1)))

    assert not hasattr(twin, "late")


def test_a_batch_that_contains_itself_ends():
    """A list, a dict and a dataclass that lead back to themselves do so in the copy."""
    batch: dict[str, Any] = {"list": []}
    batch["self"] = batch
    batch["list"].append(batch["list"])
    batch["packed"] = Packed(None)
    batch["packed"].group = batch["packed"]

    twin = copy_of_batch(batch)

    assert twin["self"] is twin
    assert twin["list"][0] is twin["list"]
    assert twin["packed"].group is twin["packed"]


def test_one_object_twice_is_one_object_twice():
    """What a batch holds in two places, the copy holds in the same two places."""
    shared = [torch.ones(1)]

    twin = copy_of_batch({"a": shared, "b": shared, "c": (shared, Packed(shared))})

    assert twin["a"] is twin["b"] is twin["c"][0] is twin["c"][1].lengths


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(12).reshape(3, 4).t(), id="transposed"),
        pytest.param(torch.arange(3).expand(4, 3), id="expanded"),
        pytest.param(torch.tensor(5), id="no dimension"),
        pytest.param(torch.empty(0, 4), id="empty"),
        pytest.param(torch.arange(12)[3:], id="with an offset"),
        pytest.param(torch.arange(12)[1::3], id="every third"),
        pytest.param(torch.ones(3, dtype=torch.bfloat16), id="bfloat16"),
        pytest.param(torch.ones(3, dtype=torch.bool)[1:], id="bool with an offset"),
        pytest.param(torch.ones(2, dtype=torch.complex128)[1:], id="complex"),
        pytest.param(torch.ones(2, 3, requires_grad=True), id="requires grad"),
        pytest.param(torch.ones(2, 3, requires_grad=True) * 2, id="part of a graph"),
        pytest.param(torch.nn.Parameter(torch.ones(2)), id="parameter"),
        pytest.param(torch.ones(3).to(torch.float8_e4m3fn), id="float8"),
        pytest.param(torch.arange(8).as_strided((3, 3), (2, 1)), id="overlapping"),
    ],
)
def test_a_tensor_keeps_its_form(tensor):
    """Size, stride, dtype, ``requires_grad`` and values are the original's; the storage is not."""
    twin = copy_of_batch([tensor])[0]

    assert _facts(twin) == _facts(tensor)
    assert torch.equal(twin.detach().to(torch.complex128), tensor.detach().to(torch.complex128))
    assert twin.is_leaf
    assert not tensor.numel() or twin.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.ones(2, 2).to_sparse(), id="sparse"),
        pytest.param(torch.ones(2, device="meta"), id="meta"),
        pytest.param(torch.ones(2).as_subclass(Tagged), id="subclass"),
        pytest.param(torch.tensor([1 + 2j]).conj(), id="conjugate view"),
        pytest.param(torch.tensor([1 + 2j]).conj().imag, id="negative view"),
    ],
)
def test_an_unusual_tensor_is_cloned(tensor):
    """A tensor that is no plain view of a storage is cloned as its own class knows how."""
    twin = copy_of_batch({"part": tensor})["part"]

    assert type(twin) is type(tensor)
    assert twin is not tensor
    assert (twin.layout, twin.dtype, twin.shape) == (tensor.layout, tensor.dtype, tensor.shape)
    assert tensor.is_meta or torch.equal(_dense(twin), _dense(tensor))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor.resolve_conj().resolve_neg()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_cloned():
    """A ragged batch in one nested tensor is copied, not taken for a strided one."""
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

    twin = copy_of_batch([ragged])[0]

    assert twin.is_nested
    assert [part.tolist() for part in twin.unbind()] == [[1, 1], [1, 1, 1]]
    assert twin is not ragged


def test_aliases_stay_aliases():
    """Tokens and labels cut out of one tensor move together in the copy, and only there."""
    text = torch.arange(10)
    batch = {
        "tokens": text[:-1],
        "labels": text[1:],
        "same": text,
        "pairs": text.view(5, 2),
        "bytes": text.view(torch.uint8),
    }

    twin = copy_of_batch(batch)
    twin["tokens"][1] = 99

    assert twin["labels"][0] == twin["same"][1] == twin["pairs"][0, 1] == twin["bytes"][8] == 99
    assert text.tolist() == list(range(10))


def test_only_the_used_part_of_a_storage_is_copied():
    """A small view of a large data set does not copy the data set."""
    data = torch.zeros(1_000_000)

    twin = copy_of_batch([data[1000:1010], data[1020:1030]])

    assert twin[0].untyped_storage().nbytes() < 1000


# --- laws over made-up batches ----------------------------------------------------------------------------------------


@st.composite
def views(draw, storage: torch.Tensor) -> torch.Tensor:
    """Draw a view of *storage*: any offset, strides with overlaps, zeros and empties, another dtype."""
    dtype = draw(st.sampled_from([torch.int64, torch.int32, torch.uint8, torch.float16]))
    whole = storage.view(dtype)
    offset = draw(st.integers(0, whole.numel() - 1))
    sizes, strides, room = [], [], whole.numel() - 1 - offset
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.integers(0, 3))
        stride = draw(st.integers(0, room // max(size - 1, 1)))
        room -= stride * max(size - 1, 0)
        sizes.append(size)
        strides.append(stride)
    return whole.as_strided(sizes, strides, offset)


@st.composite
def batches(draw) -> Any:
    """Draw a nested batch whose tensors are views of few storages, and whose parts may appear twice."""
    storages = [torch.arange(6 * n, 6 * n + 6) for n in range(draw(st.integers(1, 3)))]
    leaves = st.sampled_from(storages).flatmap(views) | st.integers() | st.none() | st.text(max_size=2)
    drawn = draw(st.lists(leaves, min_size=1, max_size=5))
    parts = st.sampled_from(drawn)
    for _ in range(draw(st.integers(0, 4))):
        children = draw(st.lists(parts, min_size=2, max_size=3))
        wrap = draw(st.sampled_from([list, tuple, _as_dict, _as_pair, _as_packed, _as_frozen]))
        drawn.append(wrap(children))
    return draw(st.lists(st.sampled_from(drawn), min_size=1, max_size=4))


def _as_dict(parts: list[Any]) -> dict[int, Any]:
    return dict(enumerate(parts))


def _as_pair(parts: list[Any]) -> Pair:
    return Pair(parts[0], parts[1])


def _as_packed(parts: list[Any]) -> Packed:
    return Packed(parts[0], parts[1])


def _as_frozen(parts: list[Any]) -> Frozen:
    return Frozen(parts)


@settings(deadline=None)
@given(batches())
def test_any_batch_is_copied_alike(batch):
    """Structure, form, values and every alias between two tensors are the original's."""
    twin = copy_of_batch(batch)
    ours, theirs = _tensors_in(twin), _tensors_in(batch)

    assert list(map(_facts, ours)) == list(map(_facts, theirs))
    assert list(map(_bytes, ours)) == list(map(_bytes, theirs))
    assert _aliases(ours) == _aliases(theirs)
    assert [a is b for a in ours for b in ours] == [a is b for a in theirs for b in theirs]


@settings(deadline=None)
@given(batches())
def test_no_batch_is_reached_through_its_copy(batch):
    """After every byte of the copy was overwritten, the original is what it was."""
    before = [_bytes(tensor) for tensor in _tensors_in(batch)]

    for tensor in _tensors_in(copy_of_batch(batch)):
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        whole.fill_(255)

    assert [_bytes(tensor) for tensor in _tensors_in(batch)] == before


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.clone(memory_format=torch.contiguous_format).numpy().tobytes()


@settings(deadline=None)
@given(batches())
def test_copying_twice_gives_the_same(batch):
    """A copy of the copy has the form of the copy."""
    once = copy_of_batch(batch)
    twice = copy_of_batch(once)

    assert list(map(_facts, _tensors_in(twice))) == list(map(_facts, _tensors_in(once)))
    assert _aliases(_tensors_in(twice)) == _aliases(_tensors_in(once))


def test_the_alias_check_can_fail():
    """The laws above would notice a copy that loses its aliases: ``deepcopy`` of parts does."""
    text = torch.arange(4)
    batch = [text[:2], text[1:]]

    assert _aliases([copy.deepcopy(part) for part in batch]) != _aliases(batch)
