"""Whatever is lent or kept comes back where it lived, and absent things are absent again."""

from __future__ import annotations

import types
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from pp_free_warmup._undo import (
    attributes_kept,
    contents_kept,
    emptied,
    entries_kept,
    fields_kept,
    mapping_kept,
    swapped,
    tensors_kept,
)


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


# --- attributes_kept, entries_kept, mapping_kept, contents_kept, fields_kept ---


def test_kept_attributes_come_back():
    """The changed, the deleted and the added one alike; others are left alone."""
    owner = SimpleNamespace(changed=1, deleted=2)
    with attributes_kept(owner, iter(["changed", "deleted", "added"])):
        owner.changed, owner.added, owner.other = 5, 6, 7
        del owner.deleted

    assert vars(owner) == {"changed": 1, "deleted": 2, "other": 7}


def test_kept_entries_come_back():
    """Of a mapping, only the listed keys."""
    mapping = {"a": 1, "b": 2}
    with entries_kept([mapping], ["a", "c"]):
        mapping.update(a=3, b=4, c=5)

    assert mapping == {"a": 1, "b": 4}


def test_a_kept_mapping_has_its_keys_objects_and_order_again():
    """Also the order, which an inventory or an iteration would show."""
    value = []
    mapping = {"a": value, "b": 2}
    with mapping_kept(mapping):
        del mapping["a"]
        mapping.update(c=3, a=[])

    assert list(mapping) == ["a", "b"]
    assert mapping["a"] is value


def test_kept_contents_come_back_into_the_same_containers():
    """Lists, sets, dicts and deques, nested ones too."""
    inner = {"x": 1}
    lists, sets, queue = [inner, 2], {1}, deque([1], maxlen=3)
    with contents_kept(lists, sets, queue, None):
        inner["x"] = 5
        inner["y"] = 6
        lists.reverse()
        sets.clear()
        queue.append(2)

    assert (lists, sets, list(queue), queue.maxlen) == ([{"x": 1}, 2], {1}, [1], 3)
    assert lists[0] is inner


def test_a_container_that_contains_itself_is_kept():
    """A cycle is walked once."""
    ring = [1]
    ring.append(ring)
    with contents_kept(ring):
        ring.clear()

    assert ring[0] == 1
    assert ring[1] is ring


def test_an_emptied_container_is_full_again():
    """It is lent empty, the same object; what was put in meanwhile goes."""
    container = [1, 2]
    with emptied(container):
        assert container == []
        container.append(3)

    assert container == [1, 2]


@pytest.mark.parametrize("make", [SimpleNamespace, Slotted])
def test_kept_fields_come_back(make):
    """Of objects with a dict or with slots: values, containers and absence."""
    owner = make()
    owner.level = [1]
    with fields_kept(owner):
        owner.level.append(2)
        owner.level = None

    assert owner.level == [1]
    bare = make()
    with fields_kept(bare):
        bare.level = 1
    assert not hasattr(bare, "level")


def test_fields_apart_are_left_alone():
    """What the caller excludes may change."""
    owner = SimpleNamespace(a=1, b=1)
    with fields_kept(owner, apart_from=["b"]):
        owner.a = owner.b = 2

    assert (owner.a, owner.b) == (1, 2)


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


class Unwritable:
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
    with pytest.raises(RuntimeError, match="gone"), tensors_kept([first, Unwritable(), last]):
        first.zero_()
        last.zero_()

    assert (first.item(), last.item()) == (1, 1)
