"""Whatever is lent or kept comes back where it lived, and absent things are absent again."""

from __future__ import annotations

import mmap
import threading
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pp_free_warmup._undo import attributes_kept, emptied, refill, swapped, tensors_kept


class Base:
    """Has an attribute, a static method and a property to inherit."""

    level = 1

    @staticmethod
    def act():
        """Do nothing."""

    @property
    def reading(self):
        """Be computed."""
        return 2

    @reading.setter
    def reading(self, value):
        raise AssertionError(value)


class Derived(Base):
    """Inherits all of it."""


class Slotted:
    """Keeps its attribute in a slot."""

    __slots__ = ("level",)


# --- swapped ---


def test_an_attribute_of_an_instance_comes_back():
    """The object that was there is there again, the very same one."""
    value = object()
    owner = SimpleNamespace(x=value)
    with swapped(owner, "x", 3) as lent:
        assert (owner.x, lent) == (3, 3)

    assert owner.x is value


def test_an_inherited_attribute_comes_back_as_inherited():
    """Swapping it on an instance leaves no entry on the instance, and none on a derived class."""
    instance = Derived()
    with swapped(instance, "level", 9), swapped(Derived, "level", 8):
        assert (instance.level, Derived.level, Base.level) == (9, 8, 1)

    assert "level" not in vars(instance)
    assert "level" not in vars(Derived)
    assert instance.level == 1


def test_a_static_method_comes_back_as_one():
    """A class is read through its dict, so the raw object comes back."""
    raw = vars(Base)["act"]
    with swapped(Base, "act", len):
        pass

    assert vars(Base)["act"] is raw


def test_an_absent_attribute_is_absent_again():
    """Of an instance, a class and a module; deleting it in the block is no error."""
    module = types.ModuleType("module")
    for owner in (SimpleNamespace(), Derived, module):
        with swapped(owner, "novel", 1):
            assert owner.novel == 1
        with swapped(owner, "novel", 1):
            del owner.novel

        assert "novel" not in vars(owner)


def test_an_attribute_deleted_in_the_block_comes_back():
    """Undo does not mind that what it lent is gone."""
    owner = SimpleNamespace(x=1)
    with swapped(owner, "x", 2):
        del owner.x

    assert owner.x == 1


def test_it_comes_back_when_the_block_raises():
    """An error does not stop the undoing, and comes out."""
    owner = SimpleNamespace(x=1)
    with pytest.raises(KeyError), swapped(owner, "x", 2):
        raise KeyError

    assert owner.x == 1


def test_swaps_of_one_attribute_nest():
    """Each block puts back what it found."""
    owner = SimpleNamespace(x=1)
    with swapped(owner, "x", 2):
        with swapped(owner, "x", 3):
            owner.x = 4
        assert owner.x == 2

    assert owner.x == 1


def test_a_plain_tensor_on_a_module_is_not_registered():
    """A module's own ``__setattr__`` is bypassed: what lived in its dict lives there again."""
    module = torch.nn.Linear(1, 1)
    parameter = torch.nn.Parameter(torch.ones(1))
    vars(module)["aside"] = parameter
    with swapped(module, "aside", torch.zeros(1)):
        pass

    assert vars(module)["aside"] is parameter
    assert "aside" not in module._parameters


def test_a_wrapper_that_forwards_attributes_keeps_them_to_itself():
    """A compiled module forwards ``setattr`` to what it wraps; nothing may be left there."""
    inner = torch.nn.Linear(1, 1)
    compiled = torch.compile(inner)
    with swapped(compiled, "novel", 1):
        pass

    assert "novel" not in vars(inner)
    assert "novel" not in vars(compiled)


@pytest.mark.parametrize(
    ("owner", "name", "home"),
    [
        (torch.nn.Linear(1, 1), "weight", "is registered in _parameters"),
        (torch.nn.BatchNorm1d(1), "running_mean", "is registered in _buffers"),
        (torch.nn.Sequential(torch.nn.Linear(1, 1)), "0", "is registered in _modules"),
        (Slotted(), "level", "lives in __slots__"),
        (Derived(), "reading", "is a property or a slot"),
        (torch.nn.Parameter(torch.ones(1)), "grad", "is a property or a slot"),
    ],
)
@pytest.mark.parametrize("move", [lambda *a: swapped(*a, None), lambda owner, name: attributes_kept(owner, [name])])
def test_what_lives_elsewhere_is_refused(owner, name, home, move):
    """Nothing is changed, and the message says where the attribute lives."""
    before = getattr(owner, name, None)
    with pytest.raises(TypeError, match=home), move(owner, name):
        pass

    assert getattr(owner, name, None) is before


# --- attributes_kept, emptied, refill ---


def test_kept_attributes_come_back():
    """The changed, the deleted and the added one alike; others are left alone."""
    owner = SimpleNamespace(changed=1, deleted=2)
    with attributes_kept(owner, iter(["changed", "deleted", "added"])):
        owner.changed, owner.added, owner.other = 5, 6, 7
        del owner.deleted

    assert vars(owner) == {"changed": 1, "deleted": 2, "other": 7}


def test_an_emptied_container_is_full_again():
    """It is lent empty, the same object; what was put in meanwhile goes."""
    container = [1, 2]
    with emptied(container):
        assert container == []
        container.append(3)

    assert container == [1, 2]


CONTAINERS = {
    "list": ([1, 2, 3], lambda it: it.reverse()),
    "set": ({1, 2}, lambda it: it.symmetric_difference_update({2, 3})),
    "dict": ({"a": 1, "b": 2}, lambda it: (it.pop("a"), it.update(c=3, a=4))),
    "ordered dict": (OrderedDict(a=1, b=2), lambda it: (it.move_to_end("a"), it.update(c=3))),
    "default dict": (defaultdict(list, a=1), lambda it: it["b"]),
    "counter": (Counter("ab"), lambda it: it.update("bc")),
    "deque": (deque([1, 2]), lambda it: (it.append(3), it.popleft())),
    "bounded deque": (deque([1, 2], maxlen=2), lambda it: it.append(3)),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_is_filled_as_it_was(kind):
    """The same contents in the same order, in the same object."""
    container, change = CONTAINERS[kind]
    before = container.copy()
    change(container)
    assert container != before or list(container) != list(before)
    refill(container, before)

    assert (list(container), container) == (list(before), before)


class Incomparable:
    """Has an ``==`` that nobody may call."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        raise AssertionError


def test_items_are_compared_by_identity_alone():
    """A tensor's, an array's or a broken ``==`` is not asked."""
    items = [Incomparable(), Incomparable()]
    listed, mapped = list(items), dict(enumerate(items))
    listed.reverse()
    mapped[0] = items[1]
    refill(listed, items)
    refill(mapped, dict(enumerate(items)))

    assert [id(one) for one in (*listed, *mapped.values())] == [id(one) for one in items] * 2


@pytest.mark.parametrize("make", [dict, OrderedDict, list, set, deque], ids=lambda make: make.__name__)
def test_a_reader_never_finds_a_container_half_empty(make):
    """A thread that reads while contents are put back sees every item that was there before and after."""
    names = [f"field {number}" for number in range(50)]
    before = make(dict.fromkeys(names)) if issubclass(make, dict) else make(names)
    shared, stop, short = before.copy(), threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                seen = set(shared)
            except RuntimeError:  # changed during iteration: as every reader of a container has to expect
                continue
            if not seen.issuperset(names):
                short.append(len(seen))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(2000):
        more = {f"added {number}": 1}
        shared.update(more) if make in (dict, OrderedDict, set) else shared.extend(more)
        refill(shared, before)
    stop.set()
    reader.join()

    assert short == []
    assert shared == before


# --- tensors_kept ---


def test_values_are_written_back_into_the_same_storage():
    """Views of the tensor see the old values again."""
    tensor = torch.arange(4.0)
    view, address = tensor[1:3], tensor.data_ptr()
    with tensors_kept([tensor]):
        tensor.mul_(7)

    assert view.tolist() == [1.0, 2.0]
    assert tensor.data_ptr() == address


def test_values_that_are_not_numbers_come_back_to_the_bit():
    """NaN payloads included."""
    tensor = torch.tensor([0x7FC00001, 0x7F800000], dtype=torch.int32).view(torch.float32)
    with tensors_kept([tensor]):
        tensor.zero_()

    assert tensor.view(torch.int32).tolist() == [0x7FC00001, 0x7F800000]


@pytest.mark.parametrize("data", [torch.zeros(2, dtype=torch.float64), torch.zeros(3, 3), torch.zeros(2)])
def test_a_tensor_with_other_data_gets_its_old_storage_back(data):
    """As Megatron's router re-assigns its expert bias, with another dtype."""
    tensor = torch.ones(2, dtype=torch.bfloat16)
    alias = tensor.detach()
    with tensors_kept([tensor]):
        tensor.data = data

    assert (tensor.dtype, tensor.tolist(), tensor.data_ptr()) == (torch.bfloat16, [1, 1], alias.data_ptr())


def test_a_graph_recorded_before_stays_valid():
    """Writing back raises no version counter: autograd still takes what it saved."""
    saved = torch.ones(2)
    leaf = torch.ones(2, requires_grad=True)
    product = (leaf * saved).sum()
    with tensors_kept([saved]):
        pass
    product.backward()

    assert leaf.grad.tolist() == [1, 1]


def test_a_parameter_is_kept_without_a_graph():
    """A leaf that requires grad is written in place, too."""
    parameter = torch.nn.Parameter(torch.ones(2))
    with tensors_kept([parameter]), torch.no_grad():
        parameter.add_(1)

    assert parameter.tolist() == [1, 1]
    assert parameter.is_leaf


def test_a_freed_storage_is_filled_again():
    """Writing into freed memory would end the process."""
    tensor = torch.arange(3.0)
    with tensors_kept([tensor]):
        tensor.untyped_storage().resize_(0)

    assert tensor.tolist() == [0, 1, 2]


def test_an_inference_tensor_is_kept():
    """Outside inference mode too, where torch forbids to write to it."""
    with torch.inference_mode():
        tensor = torch.ones(2)
    with tensors_kept([tensor]), torch.inference_mode():
        tensor.zero_()

    assert tensor.tolist() == [1, 1]


def test_a_tensor_that_overlaps_itself_is_kept():
    """An expanded buffer, one number for all, and rows that share elements."""
    expanded, rows = torch.ones(1, 2).expand(4, 2), torch.arange(5.0).as_strided((3, 3), (1, 1))
    with tensors_kept([expanded, rows]):
        expanded[0].zero_()
        rows[2].zero_()

    assert expanded.tolist() == [[1, 1]] * 4
    assert rows.tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_memory_that_is_read_only_is_not_written():
    """A table that is mapped from a file would end the process; a pass cannot have changed it."""
    array = np.frombuffer(mmap.mmap(-1, 4096, prot=mmap.PROT_READ), dtype=np.float32, count=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch cannot make a read-only tensor of it
        table = torch.from_numpy(array)
    with tensors_kept([table]):
        pass

    assert table.tolist() == [0, 0, 0, 0]


def test_tensors_without_strides_are_kept():
    """Sparse ones, and jagged ones."""
    sparse = torch.eye(2).to_sparse()
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    with tensors_kept([sparse, jagged]):
        sparse.mul_(3)
        jagged.mul_(3)

    assert sparse.to_dense().tolist() == [[1, 0], [0, 1]]
    assert jagged.values().unique().tolist() == [1]


@pytest.mark.parametrize("tensor", [torch.empty(3, device="meta"), torch.ones(3), torch.empty(0)], ids=str)
def test_a_tensor_without_memory_is_passed_over(tensor):
    """Meta tensors, freed ones and empty ones have no values to keep."""
    if not tensor.is_meta:
        tensor.untyped_storage().resize_(0)
    with tensors_kept([tensor]):
        pass

    assert tensor.is_meta or tensor.untyped_storage().nbytes() == 0


class Unwritable(torch.Tensor):
    """Gives its data while it is saved, and none when it is to be written back."""

    reads = 0

    @property
    def data(self):
        """Fail at the third read."""
        self.reads += 1
        if self.reads > 2:
            raise RuntimeError("gone")
        return torch.ones(1)


def test_one_tensor_that_cannot_be_written_back_does_not_stop_the_others():
    """Its error comes out, once the others have their values."""
    first, last = torch.ones(1), torch.ones(1)
    with pytest.raises(RuntimeError, match="gone"), tensors_kept([first, torch.ones(1).as_subclass(Unwritable), last]):
        first.zero_()
        last.zero_()

    assert (first.item(), last.item()) == (1, 1)
