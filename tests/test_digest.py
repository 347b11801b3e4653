"""A digest tells any two different values apart, whatever kind of tensor they are in, and leaves the tensor alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from pp_free_warmup._digest import tensor_digest
from pp_free_warmup._trace import observed, random_states


def _jagged(values: torch.Tensor) -> torch.Tensor:
    offsets = torch.tensor([0, 1, 4])
    return torch.nested.nested_tensor_from_jagged(values.reshape(4, 1), offsets)


def _inference(values: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return values.clone()


def _per_channel(values: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_channel(values, torch.full((4,), 0.1), torch.zeros(4), 0, torch.qint8)


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda values: values.clone(),
    "parameter": lambda values: torch.nn.Parameter(values.clone()),
    "bfloat16": lambda values: values.bfloat16(),
    "conjugate": lambda values: torch.complex(values, values).conj(),
    "negative view": torch._neg_view,
    "expanded": lambda values: values.unsqueeze(0).expand(3, 4),
    "strided": lambda values: values.repeat(2, 1).t(),
    "jagged": _jagged,
    "sparse": lambda values: values.to_sparse(),
    "sparse rows": lambda values: values.reshape(2, 2).to_sparse_csr(),
    "sparse blocks of columns": lambda values: values.reshape(2, 2).to_sparse_bsc((1, 1)),
    "quantized": lambda values: torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
    "quantized by channel": _per_channel,
    "inference": _inference,
    "of two tensors": lambda values: TwoTensor(values.clone(), values.clone()),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", KINDS)
def test_other_values_have_another_digest(kind: str) -> None:
    """Equal values have equal digests, and one value more or less is told."""
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    others = torch.tensor([1.0, 2.0, 3.0, 5.0])
    make = KINDS[kind]
    assert tensor_digest(make(values)) == tensor_digest(make(values))
    assert tensor_digest(make(values)) != tensor_digest(make(others))


def test_other_lengths_have_another_digest() -> None:
    """The same numbers in rows of other lengths are another nested tensor."""
    values = torch.ones(4, 1)
    rows = (torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, cut, 4])) for cut in (1, 2))
    assert len({tensor_digest(each) for each in rows}) == 2


def _fake(_: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def _freed(_: int) -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


WITHOUT_VALUES: dict[str, Callable[[int], torch.Tensor]] = {
    "meta": lambda _: torch.ones(3, device="meta"),
    "fake": _fake,
    "freed": _freed,
    "empty": lambda _: torch.ones(0, 3),
    "uninitialized": lambda _: torch.nn.UninitializedParameter(),
}


@pytest.mark.parametrize("kind", WITHOUT_VALUES)
def test_a_tensor_without_values_is_told_by_its_type(kind: str) -> None:
    """Nothing is read, and nothing raises."""
    assert tensor_digest(WITHOUT_VALUES[kind](0)).startswith("float32")


def test_a_mode_that_is_on_takes_no_part() -> None:
    """Under a fake mode or another default device, a real tensor's own bytes are read."""
    tensor = torch.ones(3)
    plain = tensor_digest(tensor)
    with FakeTensorMode():
        assert tensor_digest(tensor) == plain
    with torch.device("meta"):
        assert tensor_digest(tensor) == plain


def test_storages_stay_as_they_were() -> None:
    """Parameters, gradients, buffers and tensors in fields can be resized afterwards, and written where they are."""
    model = torch.nn.BatchNorm1d(2)
    model.weight.grad = torch.ones(2)
    with torch.inference_mode():
        model.scratch = torch.ones(2)
    state = model.state = torch.get_rng_state()
    observed(model)
    random_states()

    for tensor in (model.weight, model.weight.grad, model.running_mean, model.scratch, state):
        assert tensor.untyped_storage().resizable()
        tensor.untyped_storage().resize_(0)
    assert model.scratch.is_inference()
