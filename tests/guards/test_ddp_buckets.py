"""A pass under Megatron's DDP: no gather, no reduction, and the real step does what it would have done."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from case import Communication
from cases_of_training import ddp_call

from pp_free_warmup import _megatron as megatron
from pp_free_warmup.guards import ddp_buckets, fields, gradients


@pytest.fixture
def gathering():
    """A model between two steps, with its parameter gather not dispatched yet."""
    with ExitStack() as stack:
        call = ddp_call(stack, overlap_param_gather=True)
        _step(call.chunks[0])
        yield call


def _step(ddp):
    ddp.zero_grad_buffer()
    ddp(torch.ones(1, 2)).sum().backward()
    ddp.finish_grad_sync()


def _pass(call):
    """Run what the local pass runs: forward and backward inside ``no_sync``."""
    ddp = call.chunks[0]
    with ddp.no_sync():
        ddp(torch.ones(1, 2)).sum().backward()


def test_a_pass_gathers_no_parameters_and_reduces_no_gradients(gathering):
    """Forward pre-hooks and backward hooks run, and find nothing to do."""
    with fields(gathering), gradients(gathering), ddp_buckets(gathering), Communication() as communication:
        _pass(gathering)

    assert communication.operators == []


def test_the_real_step_communicates_as_if_there_had_been_no_pass(gathering):
    """The same gathers and reductions in the same order."""
    with Communication() as without:
        _step(gathering.chunks[0])
    with fields(gathering), gradients(gathering), ddp_buckets(gathering):
        _pass(gathering)
    with Communication() as after:
        _step(gathering.chunks[0])

    assert [name.split(".")[1].split("_")[0] for name in without.operators] == ["allgather", "reduce"]
    assert after.operators == without.operators


def test_a_gather_under_way_is_still_under_way_afterwards(gathering):
    """Its handle is not waited for in the pass, and the real forward finds it."""
    group = gathering.chunks[0].bucket_groups[-1]
    group.start_param_sync()
    handle = group.param_gather_handle
    with fields(gathering), gradients(gathering), ddp_buckets(gathering):
        assert group.param_gather_handle is None
        _pass(gathering)

    assert handle is not None
    assert group.param_gather_handle is handle
    _step(gathering.chunks[0])
    assert group.param_gather_handle is None


def test_a_callers_own_no_sync_stays_in_force(gathering):
    """The pass's ``no_sync`` ends inside the caller's, which Megatron would end with it."""
    groups = gathering.chunks[0].bucket_groups
    with gathering.chunks[0].no_sync():
        with fields(gathering), gradients(gathering), ddp_buckets(gathering):
            _pass(gathering)
            assert all(group.is_last_microbatch for group in groups)
        assert not any(group.is_last_microbatch for group in groups)


def test_accumulated_gradients_are_not_reduced_away(gathering):
    """The next reduction sees the real gradients only."""
    ddp = gathering.chunks[0]
    _step(ddp)
    expected = [parameter.main_grad.clone() for parameter in ddp.parameters()]
    with fields(gathering), gradients(gathering), ddp_buckets(gathering):
        _pass(gathering)
    assert [p.main_grad.tolist() for p in ddp.parameters()] == [grad.tolist() for grad in expected]
    _step(ddp)

    assert [p.main_grad.tolist() for p in ddp.parameters()] == [grad.tolist() for grad in expected]


def test_the_form_of_older_releases_is_lent_too():
    """Up to 0.15 a bucket group counts ready gradients in a set."""
    counted = {1}
    group = SimpleNamespace(
        params_with_grad=counted, is_last_microbatch=False, ddp_config=SimpleNamespace(overlap_param_gather=False)
    )
    fields = megatron.bucket_fields(group)

    assert fields == {"params_with_grad": {1}, "is_last_microbatch": False}
    assert fields["params_with_grad"] is not counted


def test_a_chunk_without_ddp_has_no_bucket_groups():
    """Nothing is assumed of other wrappers."""
    assert list(megatron.bucket_groups([torch.nn.Linear(1, 1)])) == []
