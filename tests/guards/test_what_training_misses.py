"""What goes wrong in training without a guard ("Missed by"), and does not with it."""

from __future__ import annotations

import weakref
from contextlib import ExitStack, nullcontext
from functools import partial

import pytest
import torch
from case import Communication, call_of
from cases_of_training import ddp_call
from megatron.core import rerun_state_machine
from megatron.core.pipeline_parallel import schedules
from megatron.core.timers import Timers

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import guards
from pp_free_warmup._undo import swapped
from pp_free_warmup.testing import cuda_on_cpu

with_and_without = pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])


@pytest.fixture
def stack():
    """Undo what a test changes."""
    with ExitStack() as stack:
        yield stack


def during(guard, call, guarded):
    """Return the guard's block, or for the control an empty one."""
    return guard(call) if guarded else nullcontext()


def trained(call, times=1):
    """Run forwards and backwards on the first chunk, and return its accumulated gradients."""
    for _ in range(times):
        call.chunks[0](torch.ones(1, 2)).sum().backward()
    return [parameter.main_grad.tolist() for parameter in call.chunks[0].parameters()]


@with_and_without
def test_rng_is_missed_by_the_first_loss(guarded, stack):
    """Dropout draws the mask that the pass would have drawn."""
    stack.enter_context(cuda_on_cpu())
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5))
    call = call_of(model)
    with guards.rng(call):
        cold = model(torch.ones(1, 64)).sum().item()
    with during(guards.rng, call, guarded):
        model(torch.ones(1, 64))

    assert (model(torch.ones(1, 64)).sum().item() == cold) == guarded


@with_and_without
def test_gradients_are_missed_by_the_first_steps_gradients(guarded, stack):
    """The pass's gradients would be added to those of the step; gradients accumulated before stay."""
    call = ddp_call(stack)
    with call.chunks[0].no_sync():
        accumulated = trained(call)
        with during(guards.gradients, call, guarded):
            trained(call)

    expected = [(2 * torch.tensor(grad)).tolist() for grad in accumulated]
    assert (trained(call) == expected) == guarded


@with_and_without
def test_parameters_are_missed_by_gradients_that_are_not_added(guarded, stack):
    """DDP's hook takes the flag for a gradient that a fused kernel has added already."""
    call = ddp_call(stack)
    with during(guards.fields, call, guarded):
        for parameter in call.parameters():
            parameter.grad_added_to_main_grad = True

    assert any(torch.tensor(grad).any() for grad in trained(call)) == guarded


@with_and_without
def test_ddp_buckets_are_missed_by_a_reduction_before_the_last_microbatch(guarded, stack):
    """The end of the pass's ``no_sync`` would end the caller's too."""
    call = ddp_call(stack)
    ddp = call.chunks[0]
    trained(call)
    ddp.finish_grad_sync()
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        with during(guards.ddp_buckets, call, guarded), ddp.no_sync():
            trained(call)
        with Communication() as early:
            trained(call)

    assert (early.operators == []) == guarded


@with_and_without
def test_ddp_buckets_are_missed_by_a_gather_in_the_pass(guarded, stack):
    """The real step would find its gather done, from a source that MXFP8 zeroes after it."""
    call = ddp_call(stack, overlap_param_gather=True)
    with during(guards.ddp_buckets, call, guarded), Communication() as communication, torch.no_grad():
        call.chunks[0](torch.ones(1, 2))

    assert (communication.operators == []) == guarded
    assert all(group.param_gather_dispatched != guarded for group in call.chunks[0].bucket_groups)


@with_and_without
def test_buffers_are_missed_by_what_is_counted_in_them(guarded, stack):
    """Statistics that a later evaluation, or MoE's balancing, goes by."""
    model = torch.nn.BatchNorm1d(2)
    with during(guards.values, call_of(model), guarded):
        model(torch.randn(4, 2))
    model(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))

    assert (model.num_batches_tracked.item() == 1) == guarded
    assert torch.allclose(model.running_mean, torch.tensor([0.2, 0.3])) == guarded


class CachingLinear(torch.nn.Linear):
    """Casts its weight with a scale at a step's first microbatch only, as Transformer Engine's layers do."""

    def __init__(self):
        super().__init__(2, 2)
        self.is_first_microbatch = True
        self.scale = 1.0

    def forward(self, batch):
        if self.is_first_microbatch:
            self.cast = (self.weight * self.scale).round() / self.scale
        self.is_first_microbatch = False
        return torch.nn.functional.linear(batch, self.cast)


@with_and_without
def test_first_microbatch_is_missed_by_weights_that_are_not_cast_again(guarded, stack):
    """They stay as the pass cast them, with its scales."""
    model = CachingLinear()
    with during(guards.fields, call_of(model), guarded), swapped(model, "scale", 8.0):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))

    assert torch.equal(model.cast, model.weight.round()) == guarded


class Decoding(torch.nn.Module):
    """Has its layers where Megatron's schedules look for them."""

    def __init__(self):
        super().__init__()
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
        self.decoder.input_tensor = None

    def set_input_tensor(self, tensor):
        """Keep the activation that a stage starts from, as `TransformerBlock` does."""
        self.decoder.input_tensor = tensor


@with_and_without
def test_current_microbatch_is_missed_by_the_layers_number(guarded, stack):
    """It is the number that the schedule wrote last, or none."""
    model = Decoding()
    schedules.set_current_microbatch(model, 3)
    with during(guards.fields, call_of(model), guarded):
        schedules.set_current_microbatch(model, 0)

    assert (model.decoder.layers[0].current_microbatch == 3) == guarded


@with_and_without
def test_stage_inputs_are_missed_by_memory(guarded, stack):
    """A made-up activation would live until the next step replaces it."""
    model = Decoding()
    with during(guards.fields, call_of(model), guarded):
        activation = torch.zeros(2)
        model.set_input_tensor(activation)
    alive = weakref.ref(activation)
    del activation

    assert (alive() is None) == guarded


@with_and_without
def test_timers_are_missed_by_a_timer_that_runs_already(guarded, stack):
    """After a pass that raised inside the timed part, and a run that goes on."""
    stack.enter_context(cuda_on_cpu())
    timers = Timers(2, "max")
    timers("forward").start()
    timers("forward").stop()
    call = call_of(torch.nn.Linear(1, 1))
    call.config.timers = timers
    with pytest.raises(KeyError), during(guards.timers, call, guarded):
        timers("forward").start()
        raise KeyError
    with nullcontext() if guarded else pytest.raises(AssertionError, match="already been started"):
        timers("forward").start()


@with_and_without
def test_timers_are_missed_by_the_logged_time(guarded, stack):
    """Through the config, which Megatron's step functions ask."""
    stack.enter_context(cuda_on_cpu())
    call = call_of(torch.nn.Linear(1, 1))
    call.config.timers = Timers(2, "max")
    with during(guards.timers, call, guarded):
        if call.config.timers is not None:
            call.config.timers("forward-compute", log_level=2).start()
            call.config.timers("forward-compute").stop()

    assert ("forward-compute" not in call.config.timers._timers) == guarded


@with_and_without
def test_rerun_machine_is_missed_by_a_rerun_that_is_asked_for(guarded, stack):
    """A loss of made-up activations that is not a number would repeat, and in the end stop, the job."""
    stack.enter_context(cuda_on_cpu())
    machine = rerun_state_machine.RerunStateMachine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    stack.enter_context(swapped(rerun_state_machine, megatron.RERUN_MACHINE, machine))
    machine.should_run_forward_backward(None)
    machine.first_iteration_complete = True
    with during(guards.rerun_machine, call_of(torch.nn.Linear(1, 1)), guarded):
        _validate()

    assert (machine.rerun_requested is False) == guarded
    assert (machine.validation_counts == {}) == guarded


@pytest.mark.parametrize("exists", [True, False], ids=["machine", "no-machine"])
@with_and_without
def test_rerun_machine_is_missed_by_a_pass_that_raises(guarded, exists, stack):
    """Switched off, and also where the loss itself creates it, the machine raises on the first NaN."""
    stack.enter_context(cuda_on_cpu())
    off = partial(rerun_state_machine.RerunStateMachine, mode=rerun_state_machine.RerunMode.DISABLED)
    machine = off() if exists else None
    stack.enter_context(swapped(rerun_state_machine, megatron.RERUN_MACHINE, machine))
    with nullcontext() if guarded else pytest.raises(RuntimeError, match="loss is NaN"):
        with during(guards.rerun_machine, call_of(torch.nn.Linear(1, 1)), guarded):
            _validate()

    assert guarded <= (rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE is machine)


def _validate():
    """Do what `pretrain_gpt.loss_func` does with a loss that is not a number."""
    machine = rerun_state_machine.get_rerun_state_machine()
    machine.validate_result(result=torch.tensor(float("nan")), rejection_func=torch.isnan, message="loss is NaN")


@with_and_without
def test_config_fields_are_missed_by_what_the_trainer_installed(guarded, stack):
    """A hook that a forward step replaced would stay replaced."""
    call = call_of(torch.nn.Linear(1, 1))
    call.config.finalize_model_grads_func = finalize = lambda: None
    with during(guards.fields, call, guarded):
        call.config.finalize_model_grads_func = None

    assert (call.config.finalize_model_grads_func is finalize) == guarded
