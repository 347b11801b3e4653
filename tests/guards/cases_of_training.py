"""Cases of the guards for what any training step changes: random numbers, gradients, buffers, hooks."""

from __future__ import annotations

import random
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from case import Case, Same, alone, call_of, with_fields
from megatron.core import parallel_state, rerun_state_machine
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.timers import Timers
from megatron.core.transformer.transformer_config import TransformerConfig

from pp_free_warmup import guards
from pp_free_warmup._undo import swapped
from pp_free_warmup.testing import cuda_on_cpu

# --- rng ---


def _rng_call(stack, **tracker):
    """Make a call in a process with a "GPU" and with Megatron's tracker."""
    stack.enter_context(cuda_on_cpu())
    stack.enter_context(swapped(megatron_random, "_CUDA_RNG_STATE_TRACKER", None))
    stack.enter_context(swapped(megatron_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False))
    megatron_random.initialize_rng_tracker(**tracker)
    megatron_random.get_cuda_rng_tracker().add("model-parallel-rng", 123)
    return call_of(torch.nn.Linear(1, 1))


def _graph_safe_rng_call(stack):
    """Make the tracker keep live generators, as it does for CUDA graphs."""
    stack.enter_context(swapped(torch.cuda.CUDAGraph, "register_generator_state", None))
    return _rng_call(stack, use_cudagraphable_rng=True)


def _generators(call):
    tracker = megatron_random._CUDA_RNG_STATE_TRACKER
    states = dict(tracker.states_)
    return {
        "python": repr(random.getstate()),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002 - the global generator is the subject
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "drawn from": Same(torch.cuda.default_generators[0].drawn_from),
        "tracker": [Same(tracker), Same(tracker.states_), vars(tracker).get("_current_state_name"), tracker.seeds_],
        "objects": {name: Same(state) for name, state in states.items()},
        "states": {name: _contents(state) for name, state in states.items()},
    }


def _contents(state):
    return state.get_state() if isinstance(state, torch.Generator) else state


def _draw(call):
    """Draw from every generator, inside Megatron's fork too, and give the tracker one more entry."""
    random.random()
    np.random.rand()  # noqa: NPY002
    torch.rand(1)
    tracker = megatron_random.get_cuda_rng_tracker()
    with tracker.fork():
        torch.nn.functional.dropout(torch.ones(8), 0.5)
    torch.nn.functional.dropout(torch.ones(8), 0.5)
    seed = max(tracker.seeds_) + 1
    tracker.add(f"of seed {seed}", seed)


# --- parameters, gradients ---


def _accumulating_call(stack):
    """Make a call in the middle of accumulation: both kinds of gradient hold something."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2, dtype=torch.bfloat16))
    buffer = torch.arange(float(sum(parameter.numel() for parameter in model.parameters())))
    for parameter in model.parameters():
        parameter.main_grad = buffer[: parameter.numel()].view(parameter.shape)
        parameter.grad_added_to_main_grad = False
        parameter.grad = torch.ones_like(parameter)
    model[1].bias.main_grad = model[1].bias.main_grad.bfloat16()
    model[0].bias.main_grad = torch.ones(4)[::2]
    return call_of(model)


def _gradients(call):
    parameters = list(call.chunks[0].parameters())
    return {
        "main_grad": [[Same(p.main_grad), p.main_grad] for p in parameters],
        "grad": [[Same(p.grad), p.grad] for p in parameters],
    }


def _accumulate(call):
    """Do what a fused weight gradient, DDP's hook and autograd do."""
    for parameter in call.chunks[0].parameters():
        parameter.main_grad.add_(torch.ones_like(parameter).to(parameter.main_grad.dtype))
        parameter.grad = torch.full_like(parameter, 7) if parameter.grad is None else None


def _attributes(call):
    return [{name: Same(value) for name, value in vars(p).items()} for p in call.chunks[0].parameters()]


def _mark(call):
    for parameter in call.chunks[0].parameters():
        parameter.grad_added_to_main_grad = not parameter.grad_added_to_main_grad
        parameter.transposed_cache = parameter.detach().clone()
        parameter._do_not_offload = True  # fine-grained offloading, from 0.19 on
        parameter.offloading_activation = False  # up to 0.18


# --- ddp_buckets ---


def ddp_call(stack, **options):
    """Make a call with a model in Megatron's DDP, the only rank of its world."""
    stack.enter_context(alone())
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        stack.callback(parallel_state.destroy_model_parallel)
    stack.enter_context(cuda_on_cpu())
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, **options)
    ddp = DistributedDataParallel(config, ddp_config, model)
    return call_of(ddp, config=config)


def _gathering_ddp_call(stack):
    """Make a call between two steps: one reduction done, the next parameter gather not dispatched yet."""
    call = ddp_call(stack, overlap_param_gather=True)
    _train(call.chunks[0])
    return call


def _train(ddp):
    """Run one step: forward, backward, reduction; then be ready for the next one."""
    ddp(torch.ones(1, 2)).sum().backward()
    ddp.finish_grad_sync()
    ddp.zero_grad_buffer()


def _buckets(call):
    ddp = call.chunks[0]
    return {
        "groups": [
            {name: Same(value) if _is_object(value) else value for name, value in vars(group).items()}
            for group in ddp.bucket_groups
        ],
        "contents": [
            [set(vars(group).get("params_with_grad", ())), dict(vars(group).get("per_param_grad_ready_counts", {}))]
            for group in ddp.bucket_groups
        ],
        "hooks": [
            [Same(module._forward_pre_hooks), *map(Same, module._forward_pre_hooks.values())]
            for module in ddp.modules()
        ],
        "parameters": [parameter.data for parameter in ddp.parameters()],
    }


def _is_object(value):
    return not isinstance(value, bool | int)


def _backward_without_no_sync(call):
    """Register gradients as ready, as a pass would that forgot ``no_sync``, then leave one."""
    ddp = call.chunks[0]
    ddp(torch.ones(1, 2))
    for group in ddp.bucket_groups:
        group.is_last_microbatch = True
        registered = vars(group).get("params_with_grad", ())  # up to 0.15, where each may register once
        group.register_grad_ready(next(p for p in group.params if p not in registered))
        group.is_last_microbatch = False
        if "is_first_batch" in vars(group):
            group.is_first_batch = not group.is_first_batch


# --- buffers ---


class Counting(torch.nn.Module):
    """Counts in a persistent and in a non-persistent buffer, and re-assigns one as Megatron's router does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("counted", torch.zeros(3))
        self.register_buffer("passing", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.register_buffer("bias", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("nothing", None)
        self.inner = torch.nn.BatchNorm1d(2)

    def forward(self):
        self.counted += 1
        self.passing[0] += 2
        self.bias.data = self.bias.data.float() + 1
        self.inner.num_batches_tracked = self.inner.num_batches_tracked + 1
        name = f"scratch_{len(self._buffers)}"
        self.register_buffer(name, torch.zeros(1), persistent=False)
        self.nothing = torch.ones(1)


def _buffers(call):
    return {
        name: {
            "objects": {key: Same(value) for key, value in module._buffers.items()},
            "storage": [value.data_ptr() for value in module._buffers.values() if value is not None],
            "values": [value for value in module._buffers.values() if value is not None],
            "not saved": module._non_persistent_buffers_set,
        }
        for name, module in call.chunks[0].named_modules()
    }


# --- attributes of modules ---


def _layers_call(stack):
    """Make a call with two layers of which one carries what a schedule and a pass write on layers."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].is_first_microbatch = True
    model[0].current_microbatch = 3
    model[0].input_tensor = torch.ones(2)
    return call_of(model)


def _layers(call):
    return [{name: Same(value) for name, value in vars(module).items()} for module in call.modules()]


def _clear_first(call):
    call.chunks[0].modules_with_is_first_microbatch = [call.chunks[0][0]]
    call.chunks[0][0].is_first_microbatch = not call.chunks[0][0].is_first_microbatch


def _number(call):
    for layer in call.chunks[0]:
        layer.current_microbatch = vars(layer).get("current_microbatch", 0) + 1


def _hand_over(call):
    for layer in call.chunks[0]:
        layer.input_tensor = torch.zeros(2)
    call.chunks[0].encoder_hidden_state = torch.zeros(2)


# --- timers, rerun_machine, config_fields ---


def _timed_call(stack):
    """Make a call while one timer runs; a training loop's timers are known to its globals and to the config."""
    stack.enter_context(cuda_on_cpu())
    timers = Timers(2, "max")
    loop = ModuleType("megatron.training.global_vars")  # the wheels of 0.16 and before do not ship it
    loop._GLOBAL_TIMERS = timers
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setitem(sys.modules, loop.__name__, loop)
    timers("interval").start()
    timers("batch").start()
    timers("batch").stop()
    return call_of(torch.nn.Linear(1, 1), config=ModelParallelConfig(timers=timers), timers=timers)


def _times(call):
    timers = call.keywords["timers"]
    return {
        "of the config": Same(call.config.timers),
        "log levels": timers._log_levels,
        "timers": {name: [Same(timer), vars(timer)] for name, timer in timers._timers.items()},
    }


def _time(call):
    """Time a step that raises before it can stop its timer."""
    timers = call.keywords["timers"]
    if not timers("batch")._started:
        timers("batch").start()
    timers(f"new {len(timers._timers)}", log_level=1).start()


def _judged_call(stack):
    """Make a call in a process whose rerun machine has seen iterations before."""
    stack.enter_context(cuda_on_cpu())
    machine = rerun_state_machine.RerunStateMachine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    stack.enter_context(swapped(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine))
    machine.should_run_forward_backward(None)
    machine.first_iteration_complete = True
    return call_of(torch.nn.Linear(1, 1))


def _unjudged_call(stack):
    """Make a call in a process without a rerun machine."""
    stack.enter_context(cuda_on_cpu())
    stack.enter_context(swapped(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", None))
    return call_of(torch.nn.Linear(1, 1))


def _judgements(call):
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    return {
        "machine": Same(machine),
        "class": Same(rerun_state_machine.RerunStateMachine.validate_result),
        "fields": {name: Same(value) for name, value in vars(machine or object).items()} if machine else {},
        "counts": [dict(machine.validation_counts), dict(machine.max_values)] if machine else [],
    }


def _judge(call):
    """Validate a loss that is not a number, and look for large ones."""
    machine = rerun_state_machine.get_rerun_state_machine()
    machine.validate_result(torch.tensor(float("nan")), torch.isnan, "loss is NaN")
    machine.is_unexpectedly_large(torch.tensor(float(len(machine.max_values))), 10.0, "loss")
    machine.validation_counts["direct"] += 1


def _hooked_call(stack):
    """Make a call whose config carries a trainer's hooks."""
    config = ModelParallelConfig(
        no_sync_func=lambda: None, grad_sync_func=[print], param_sync_func=print, finalize_model_grads_func=print
    )
    return call_of(torch.nn.Linear(1, 1), config=config)


def _fields(call):
    return {name: Same(value) for name, value in vars(call.config).items()}


def _overwrite(call):
    call.config.grad_sync_func = [call.config.grad_sync_func]
    call.config.param_sync_func = None
    call.config.grad_scale_func = len
    call.config.appeared = object()


CASES = (
    Case(guards.rng, _rng_call, _generators, _draw, variant="bytes"),
    Case(guards.rng, _graph_safe_rng_call, _generators, _draw, variant="graph-safe"),
    Case(guards.fields, _accumulating_call, _attributes, _mark, variant="parameters"),
    Case(guards.gradients, _accumulating_call, _gradients, _accumulate),
    Case(guards.ddp_buckets, ddp_call, _buckets, _backward_without_no_sync),
    Case(guards.ddp_buckets, _gathering_ddp_call, _buckets, _backward_without_no_sync, variant="gathering"),
    Case(with_fields(guards.values), lambda stack: call_of(Counting()), _buffers, lambda call: call.chunks[0]()),
    Case(guards.fields, _layers_call, _layers, _clear_first, variant="first microbatch"),
    Case(guards.fields, _layers_call, _layers, _number, variant="current microbatch"),
    Case(guards.fields, _layers_call, _layers, _hand_over, variant="stage inputs"),
    Case(guards.timers, _timed_call, _times, _time),
    Case(guards.rerun_machine, _judged_call, _judgements, _judge),
    Case(guards.rerun_machine, _unjudged_call, _judgements, _judge, variant="absent"),
    Case(guards.fields, _hooked_call, _fields, _overwrite, variant="config"),
)
