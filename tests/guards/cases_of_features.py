"""Cases of the guards for parts of Megatron and Transformer Engine that not every run has.

They use the classes of the installed release. What it lacks is stood in for by a module of the same
layout, so that every guard is under the laws in every environment.
"""

from __future__ import annotations

import importlib
import queue
import sys
import warnings
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import torch
import transformer_engine_like as te_like
from case import Case, Same, call_of, with_fields
from megatron.core import utils
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

from pp_free_warmup import guards
from pp_free_warmup._undo import swapped
from pp_free_warmup.testing import cuda_on_cpu

MOE = "megatron.core.transformer.moe"
OFFLOAD = "megatron.core.pipeline_parallel.fine_grained_activation_offload"


def real(name):
    """Return a module that the installed release may lack, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


@contextmanager
def present(name, **contents):
    """Let a module of that name be loaded: the release's own, else one with *contents*."""
    module = real(name)
    if module is not None:
        yield module
        return
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    try:
        yield module
    finally:
        del sys.modules[name]


def plain(*attributes):
    """Return a module with these attributes set to None."""
    module = torch.nn.Linear(1, 1)
    for name in attributes:
        setattr(module, name, None)
    return module


# --- loss_trackers, loss_scales ---

DSA = real("megatron.core.transformer.experimental_attention_variant.dsa")  # 0.16 on
LOGGING = real(f"{MOE}.moe_logging")  # 0.18 on
MTP = multi_token_prediction.MTPLossLoggingHelper
TRACKERS = [
    (LOGGING, "_MOE_METRICS_TRACKER") if LOGGING else (moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER"),
    (MTP, "tracker"),
    *([(DSA.DSAIndexerLossLoggingHelper, "tracker")] if DSA else []),
]
SCALERS = [
    moe_utils.MoEAuxLossAutoScaler,
    multi_token_prediction.MTPLossAutoScaler,
    *([DSA.DSAIndexerLossAutoScaler] if DSA else []),
]


def _unlogged_call(stack):
    stack.enter_context(cuda_on_cpu())
    for owner, name in TRACKERS:
        stack.enter_context(swapped(owner, name, None if owner is LOGGING else {}))
    return call_of(plain())


def _logged_call(stack):
    call = _unlogged_call(stack)
    _log(call)
    return call


def _losses(call):
    found = [getattr(owner, name) for owner, name in TRACKERS]
    return {"objects": [Same(tracker) for tracker in found], "contents": [_entries(tracker) for tracker in found]}


def _entries(tracker):
    """Show what a tracker holds: a dict, or (0.18 on) an object with one entry per metric."""
    if tracker is None or isinstance(tracker, dict):
        return tracker
    return {name: dict(vars(entry)) for name, entry in tracker.metrics.items()}


def _log(call):
    """Let one layer of each kind report a loss, as its forward does."""
    loss = torch.tensor(0.5)
    if LOGGING:
        LOGGING.get_moe_metrics_tracker().record("load_balancing_loss", loss, 1, 2)
    else:
        moe_utils.save_to_aux_losses_tracker("load_balancing_loss", loss, 1, 2)
    if hasattr(MTP, "save_metrics_to_tracker"):  # 0.18 on
        MTP.save_metrics_to_tracker(loss, loss, loss, 0, 1)
    else:
        MTP.save_loss_to_tracker(loss, 0, 1)
    if DSA:
        DSA.DSAIndexerLossLoggingHelper.save_loss_to_tracker(loss, 1, 2)


class Overload:
    """What the branch dev keeps beside the losses; stands in for it elsewhere."""

    def __init__(self):
        self.timeline = []

    def record_bwd(self, tokens, balanced):
        self.timeline.append(tokens)


def _calm_call(stack):
    """Make a call in a process whose experts have recorded nothing yet."""
    logging = stack.enter_context(present(f"{MOE}.moe_logging"))
    stack.enter_context(swapped(logging, "_MOE_OVERLOAD_FACTOR_TRACKER", None))
    stack.enter_context(swapped(logging, "Overload", getattr(logging, "MoEOverloadFactorTracker", Overload)))
    return call_of(plain())


def _overloaded_call(stack):
    call = _calm_call(stack)
    _overload(call)
    return call


def _overloads(call):
    logging = sys.modules[f"{MOE}.moe_logging"]
    tracker = logging._MOE_OVERLOAD_FACTOR_TRACKER
    return [Same(logging), Same(tracker), tracker if tracker is None else dict(vars(tracker))]


def _overload(call):
    """Let one layer record its backward, as it does with `log_moe_overload_factor`."""
    logging = sys.modules[f"{MOE}.moe_logging"]
    if logging._MOE_OVERLOAD_FACTOR_TRACKER is None:
        logging._MOE_OVERLOAD_FACTOR_TRACKER = logging.Overload()
    logging._MOE_OVERLOAD_FACTOR_TRACKER.record_bwd(torch.tensor(3.0), torch.tensor(2.0))


def _unscaled_call(stack):
    for scaler in SCALERS:
        first = scaler.main_loss_backward_scale if scaler is SCALERS[1] else None
        stack.enter_context(swapped(scaler, "main_loss_backward_scale", first))
    return call_of(plain())


def _scaled_call(stack):
    call = _unscaled_call(stack)
    _scale(call)
    return call


def _scales(call):
    scales = [scaler.main_loss_backward_scale for scaler in SCALERS]
    return {"objects": [Same(scale) for scale in scales], "values": scales}


def _scale(call):
    for scaler in SCALERS:
        old = scaler.main_loss_backward_scale
        scaler.set_loss_scale(torch.tensor(1.0) if old is None else old + 1)


# --- routers ---


class Replay:
    """What a router of 0.16 on keeps, for releases before."""

    global_router_replay_instances: ClassVar[list] = []

    def __init__(self):
        self.recorded_topk_idx = None
        self.replay_backward_list = []
        self.global_router_replay_instances.append(self)

    def record_indices(self, indices):
        self.recorded_topk_idx = indices


def _replayed_call(stack):
    """Make a call with one router that Megatron's list knows, and one that a trainer cleared from it."""
    kind = stack.enter_context(present(f"{MOE}.router_replay", RouterReplay=Replay)).RouterReplay
    stack.enter_context(swapped(kind, "global_router_replay_instances", []))
    cleared = kind()
    kind.global_router_replay_instances.clear()
    router = plain()
    router.router_replay = cleared
    for replay in (kind(), cleared):
        replay.replay_backward_list += [torch.full((2, 1), step) for step in range(9)]
        replay.static_buffer = torch.zeros(4, 1, dtype=torch.int64)
    return call_of(router)


def _replaying(call):
    kind = sys.modules[f"{MOE}.router_replay"].RouterReplay
    return [*kind.global_router_replay_instances, call.chunks[0].router_replay]


def _replays(call):
    return [
        {
            "fields": {name: Same(value) for name, value in vars(replay).items()},
            "left": [Same(indices) for indices in replay.replay_backward_list],
            "recorded": replay.static_buffer,
        }
        for replay in _replaying(call)
    ]


def _replay(call):
    """Record a forward (in the static buffer from 0.17 on), and replay a recomputed one."""
    for replay in _replaying(call):
        replay.record_indices(torch.ones(2, 1, dtype=torch.int64))
        replay.static_buffer += 1
        replay.replay_backward_list.pop(0)


def _unseeded_call(stack):
    """Make a call in 0.14 or 0.15, whose class keeps the generator that its first use makes."""
    stack.enter_context(swapped(moe_utils.RandomSTE, "generator", None))
    return call_of(plain())


def _seeded_call(stack):
    call = _unseeded_call(stack)
    _route_at_random(call)
    return call


def _generator(call):
    generator = moe_utils.RandomSTE.generator
    return [Same(generator), Same(moe_utils.RandomSTE), None if generator is None else generator.get_state()]


def _route_at_random(call):
    if moe_utils.RandomSTE.generator is None:
        moe_utils.RandomSTE.generator = torch.Generator()
        moe_utils.RandomSTE.generator.manual_seed(42)
    torch.zeros(3).normal_(generator=moe_utils.RandomSTE.generator)


def _biased_call(stack):
    stack.enter_context(swapped(moe_utils.RandomSTEShared, "_cache", {1: torch.ones(2)}))
    return call_of(plain())


def _biases(call):
    cache = moe_utils.RandomSTEShared._cache
    return [Same(cache), {layer: [Same(bias), bias] for layer, bias in cache.items()}]


def _draw_bias(call):
    """Draw the bias of one more layer, as its first forward does."""
    cache = moe_utils.RandomSTEShared._cache
    cache[len(cache) + 1] = torch.rand(2)


def _budgeted_call(stack):
    layers = torch.nn.Sequential(*(plain() for _ in range(4)))
    for layer in layers:
        layer.token_dispatcher = object.__new__(MoEFlexTokenDispatcher)
        layer.token_dispatcher._comm_manager = SimpleNamespace(over_budget=torch.zeros(1, dtype=torch.bool))
    return call_of(layers)


def _flags(call):
    flags = [layer.token_dispatcher._comm_manager.over_budget for layer in call.chunks[0]]
    return {"objects": [Same(flag) for flag in flags], "raised": flags}


def _exceed(call):
    """Raise the next flag that is still down."""
    flags = [layer.token_dispatcher._comm_manager.over_budget for layer in call.chunks[0]]
    next(flag for flag in flags if not flag).logical_or_(torch.ones(1, dtype=torch.bool))


def _traced_call(stack):
    trace = stack.enter_context(present(f"{MOE}.router_trace"))
    stack.enter_context(swapped(trace, "_MOE_ROUTER_TRACER", SimpleNamespace(_stopped=False)))
    return call_of(plain())


def _tracer(call):
    tracer = sys.modules[f"{MOE}.router_trace"]._MOE_ROUTER_TRACER
    return [Same(tracer), tracer._stopped]


def _stop_or_start(call):
    tracer = sys.modules[f"{MOE}.router_trace"]._MOE_ROUTER_TRACER
    tracer._stopped = not tracer._stopped


# --- attention, FP8, weight gradients ---


def _clipped_call(stack):
    model = torch.nn.Sequential(plain("current_max_attn_logits"), plain("current_max_attn_logits"))
    model[1].current_max_attn_logits = torch.ones(2)
    return call_of(model)


def _maxima(call):
    return [[Same(layer.current_max_attn_logits), layer.current_max_attn_logits] for layer in call.chunks[0]]


def _attend(call):
    for layer in call.chunks[0]:
        old = layer.current_max_attn_logits
        layer.current_max_attn_logits = torch.ones(2) if old is None else torch.max(old, old + 1)


def _fp8_call(stack, version, trained):
    """Make a call with an FP8 layer, a fused operation that no module registers, and another model's layer."""
    manager = stack.enter_context(te_like.loaded(version))
    model = torch.nn.Sequential(te_like.Layer(), plain())
    model[1]._fused_impl = (torch.nn.Sequential(te_like.Operation()),)
    call = call_of(model, manager=manager, other=te_like.Layer())
    te_like.state_of(manager).skip_fp8_weight_update_tensor = torch.zeros(1)
    te_like.autocast(manager, [call.keywords["other"]], torch.ones(2))
    if trained:
        _fp8_step(call)
    return call


def _fp8_modules(call):
    model = call.chunks[0]
    return [model[0], model[1]._fused_impl[0][0], call.keywords["other"]]


def _fp8_step(call):
    te_like.autocast(call.keywords["manager"], _fp8_modules(call)[:2], torch.full((2,), 3.0))


def _fp8(call):
    manager = call.keywords["manager"]
    state = te_like.state_of(manager)
    names = te_like.FP8GlobalState.__slots__ if state is not manager else [n for n in vars(manager) if n[:2] != "__"]
    return {
        "state": Same(state),
        "manager": {name: _with_identity(getattr(state, name)) for name in names if name != "reset"},
        "modules": [
            {name: _with_identity(value) for name, value in vars(module).items() if _is_own_field(name)}
            for module in _fp8_modules(call)
        ],
    }


def _is_own_field(name):
    return name not in vars(torch.nn.Module())


def _with_identity(value):
    """Show an object and, where it has parts or values, those too."""
    if isinstance(value, torch.Tensor | torch.nn.Parameter):
        return [Same(value), value]
    if isinstance(value, dict):
        return [Same(value), {key: _with_identity(item) for key, item in value.items()}]
    if isinstance(value, list | tuple) or type(value).__name__ == "deque":
        return [Same(value), [_with_identity(item) for item in value]]
    if isinstance(value, te_like.DelayedScalingRecipeState | te_like.Quantizer):
        return [Same(value), _with_identity(vars(value))]
    return Same(value)


def _fused_call(stack):
    model = torch.nn.Sequential(plain("_fused_impl", "_norm_seq"), plain("_fused_ops"), plain(*FUSED_SHARED_EXPERT))
    model[1]._fused_ops = (torch.nn.ReLU(),)
    model[2]._fused_grouped_swiglu_tokens_per_expert = {"small": torch.ones(1)}
    return call_of(model)


FUSED_SHARED_EXPERT = tuple(f"_fused_grouped_swiglu_{part}" for part in ("ops", "recipe", "unit_scale"))


def _fused(call):
    fields = [vars(layer) for layer in call.chunks[0]]
    own = [{name: Same(value) for name, value in each.items() if _is_own_field(name)} for each in fields]
    return [*own, fields[2]["_fused_grouped_swiglu_tokens_per_expert"]]


def _fuse(call):
    layers = call.chunks[0]
    layers[0]._norm_seq, layers[0]._recipe = (torch.nn.ReLU(),), "recipe"
    for layer, name in ((layers[0], "_fused_impl"), (layers[1], "_fused_ops"), (layers[2], FUSED_SHARED_EXPERT[0])):
        setattr(layer, name, (torch.nn.ReLU(),))
    for name in FUSED_SHARED_EXPERT[1:]:
        setattr(layers[2], name, torch.ones(1))
    layers[2]._fused_grouped_swiglu_tokens_per_expert["large"] = torch.ones(2)


# --- shared_experts ---

HALF_WAY = ("cached_fc1_input", "cached_fc2_input", "cached_fc2_output", "cached_output", "gate_score")


def _sharing_call(stack):
    model = torch.nn.Sequential(plain(*HALF_WAY), plain())
    model[0]._overlap_state = "idle"
    return call_of(model)


def _half_way(call):
    return [
        {name: Same(value) for name, value in vars(layer).items() if _is_own_field(name)} for layer in call.chunks[0]
    ]


def _stop_half_way(call):
    call.chunks[0][0]._overlap_state = "sent"
    for name in HALF_WAY:
        setattr(call.chunks[0][0], name, torch.ones(1))


def _deferring_call(stack):
    """Make a call whose model and output layer share their lists, with a gradient still to be computed."""
    model = torch.nn.Sequential(plain(), plain())
    for name in ("embedding_activation_buffer", "grad_output_buffer"):
        shared = [torch.ones(1)]
        setattr(model, name, shared)
        setattr(model[0], name, shared)
    model[1].wgrad_store = SimpleNamespace(context=queue.Queue(), enabled=True)
    model[1]._fused_ops = (plain(),)
    model[1]._fused_ops[0].wgrad_store = SimpleNamespace(context=queue.Queue(), enabled=True)
    call = call_of(model)
    _defer(call)
    return call


def _stores(call):
    return [call.chunks[0][1].wgrad_store, call.chunks[0][1]._fused_ops[0].wgrad_store]


def _deferred(call):
    lists = [call.chunks[0].embedding_activation_buffer, call.chunks[0].grad_output_buffer]
    return {
        "lists": [[Same(one), [Same(tensor) for tensor in one]] for one in lists],
        "queues": [[Same(store.context), [Same(item) for item in store.context.queue]] for store in _stores(call)],
    }


def _defer(call):
    call.chunks[0].embedding_activation_buffer.append(torch.zeros(1))
    call.chunks[0].grad_output_buffer.append(torch.zeros(1))
    for store in _stores(call):
        store.context.put([[torch.zeros(1)], print])


# --- plans: offloading, stashing, CUDA graphs ---


class OffloadManager:
    """What `PipelineOffloadManager` of 0.16 on keeps, for releases before."""

    OFFLOAD_MGR = None

    @classmethod
    def reset_instance(cls):
        cls.OFFLOAD_MGR = cls()

    def init_model_chunk_offload_handler(self):
        """Be there."""


def _offload_manager():
    return sys.modules[OFFLOAD].PipelineOffloadManager


def _offloading_call(stack):
    stack.enter_context(cuda_on_cpu())
    stack.enter_context(present(OFFLOAD, PipelineOffloadManager=OffloadManager))
    stack.enter_context(swapped(_offload_manager(), "OFFLOAD_MGR", _offload_manager()()))
    model = plain()
    model.disable_param_offloading = True
    return call_of(model)


def _offloading(call):
    return {
        "manager": Same(_offload_manager().OFFLOAD_MGR),
        "handler": Same(vars(_offload_manager())["init_model_chunk_offload_handler"]),
        "marked": call.chunks[0].disable_param_offloading,
    }


def _plan_offloading(call):
    _offload_manager().reset_instance()
    call.chunks[0].disable_param_offloading = False


def _stashing_call(stack):
    stack.enter_context(cuda_on_cpu())
    stash = stack.enter_context(present(f"{MOE}.paged_stash", PagedStashManager=type("PagedStashManager", (), {})))
    stack.enter_context(swapped(stash.PagedStashManager, "STASH_MGR", stash.PagedStashManager()))
    return call_of(plain())


def _stashing(call):
    return Same(sys.modules[f"{MOE}.paged_stash"].PagedStashManager.STASH_MGR)


def _plan_stashing(call):
    manager = sys.modules[f"{MOE}.paged_stash"].PagedStashManager
    manager.STASH_MGR = manager()


def _graphed_call(stack):
    layers = torch.nn.Sequential(plain(), plain())
    layers[0].cuda_graphs = [print]
    layers[1].cuda_graphs = []
    return call_of(layers)


def _graphs(call):
    graphs = [layer.cuda_graphs for layer in call.chunks[0]]
    return {
        "call": Same(vars(CudaGraphManager)["__call__"]),
        "graphs": [[Same(one), list(map(Same, one))] for one in graphs[:1]],
        "none yet": Same(graphs[1]),
    }


def _graph(call):
    CudaGraphManager.__call__ = lambda *arguments: arguments
    call.chunks[0][0].cuda_graphs.append(len)


# --- flags, statistics, logs, profilers ---


def _recomputing_call(stack):
    stack.enter_context(te_like.loaded((2, 20)))
    stack.enter_context(swapped(megatron_random, "IS_CHECKPOINTING", False))  # 0.16 on
    return call_of(plain())


def _phase(call):
    te = sys.modules[te_like.DISTRIBUTED]
    waiting = te.activation_recompute_forward._is_first_fp8_module
    flags = [te._USE_REENTRANT_ACTIVATION_RECOMPUTE, te._IN_ACTIVATION_RECOMPUTE_REGION, te._ACTIVATION_RECOMPUTE_PHASE]
    return {"flags": [megatron_random.IS_CHECKPOINTING, *flags], "waiting": [Same(waiting), list(waiting)]}


def _recompute(call):
    """Fail in the middle of a checkpointed layer."""
    te = sys.modules[te_like.DISTRIBUTED]
    megatron_random.IS_CHECKPOINTING = not megatron_random.IS_CHECKPOINTING
    te._IN_ACTIVATION_RECOMPUTE_REGION = not te._IN_ACTIVATION_RECOMPUTE_REGION
    te._ACTIVATION_RECOMPUTE_PHASE = True
    te.activation_recompute_forward._is_first_fp8_module.append(True)


def _counted_call(stack):
    training = stack.enter_context(
        present("megatron.training.training", _seqlen_stats_in_iteration=None, _seqlen_stats_active=False)
    )
    stack.enter_context(swapped(training, "_seqlen_stats_in_iteration", torch.ones(2, dtype=torch.float64)))
    stack.enter_context(swapped(training, "_seqlen_stats_active", True))
    return call_of(plain())


def _counts(call):
    training = sys.modules["megatron.training.training"]
    sums = training._seqlen_stats_in_iteration
    return [Same(sums), sums, training._seqlen_stats_active]


def _count(call):
    training = sys.modules["megatron.training.training"]
    lengths = torch.tensor([0, 2, 5])
    if hasattr(training, "update_seqlen_stats_from_cu_seqlens"):
        training.update_seqlen_stats_from_cu_seqlens(lengths)
        return
    old = training._seqlen_stats_in_iteration
    training._seqlen_stats_in_iteration = old + 1 if old is not None else torch.zeros(2)
    training._seqlen_stats_active = True


def _saving_call(stack):
    for name, kind in (("activation_logging", "ActivationLogger"), ("dgrad_logging", "DataGradLogger")):
        module = stack.enter_context(present(f"megatron.training.{name}", _LOGGER=None))
        logger = getattr(module, kind)("folder") if hasattr(module, kind) else SimpleNamespace(_records={})
        stack.enter_context(swapped(module, "_LOGGER", logger))
    call = call_of(plain())
    _save(call)
    return call


def _records(call):
    loggers = [sys.modules[f"megatron.training.{name}"]._LOGGER for name in ("activation_logging", "dgrad_logging")]
    return [record for logger in loggers for record in vars(logger).values() if isinstance(record, dict)]


def _saved(call):
    return [[Same(record), {key: Same(value) for key, value in record.items()}] for record in _records(call)]


def _save(call):
    for record in _records(call):
        record[len(record)] = {"output0": torch.ones(1)}


def _straggling_call(stack):
    timer = utils.__straggler__
    stack.enter_context(swapped(timer, "start", timer.start_method))
    stack.enter_context(swapped(timer, "stop", timer.stop_method))
    return call_of(plain())


def _timer(call):
    timer = utils.__straggler__
    return {"methods": [Same(timer.start), Same(timer.stop)], "data next": timer.bdata}


def _time_data(call):
    """Leave the timer as an exception between its call and its start would."""
    utils.__straggler__(bdata=not utils.__straggler__.bdata)


def _profiled_call(stack):
    stack.enter_context(swapped(utils, "_nvtx_range_messages", ["iteration"]))
    return call_of(plain())


def _ranges(call):
    return [Same(utils._nvtx_range_messages), list(utils._nvtx_range_messages)]


def _profile(call):
    utils._nvtx_range_messages.append("layer")


CASES = (
    Case(guards.loss_trackers, _unlogged_call, _losses, _log, variant="empty"),
    Case(guards.loss_trackers, _logged_call, _losses, _log, variant="filled"),
    Case(guards.loss_trackers, _calm_call, _overloads, _overload, variant="no-overload"),
    Case(guards.loss_trackers, _overloaded_call, _overloads, _overload, variant="overload"),
    Case(guards.loss_scales, _unscaled_call, _scales, _scale, variant="unset"),
    Case(guards.loss_scales, _scaled_call, _scales, _scale, variant="set"),
    Case(guards.router_replay, _replayed_call, _replays, _replay),
    Case(guards.router_random, _unseeded_call, _generator, _route_at_random, variant="unseeded"),
    Case(guards.router_random, _seeded_call, _generator, _route_at_random, variant="seeded"),
    Case(guards.router_budget, _budgeted_call, _flags, _exceed),
    Case(guards.router_trace, _traced_call, _tracer, _stop_or_start),
    Case(guards.fields, _clipped_call, _maxima, _attend, variant="attention maxima"),
    *(
        Case(
            with_fields(guards.fp8_state),
            lambda stack, version=version, trained=trained: _fp8_call(stack, version, trained),
            _fp8,
            _fp8_step,
            variant=f"{version[0]}.{version[1]}-{'trained' if trained else 'fresh'}",
        )
        for version in ((2, 8), (2, 14), (2, 20))
        for trained in (False, True)
    ),
    Case(guards.fields, _fused_call, _fused, _fuse, variant="fused operations"),
    Case(guards.fields, _sharing_call, _half_way, _stop_half_way, variant="shared experts"),
    Case(guards.fields, _deferring_call, _deferred, _defer, variant="weight gradients"),
    Case(with_fields(guards.activation_offload), _offloading_call, _offloading, _plan_offloading),
    Case(guards.paged_stash, _stashing_call, _stashing, _plan_stashing),
    Case(guards.cuda_graphs, _graphed_call, _graphs, _graph),
    Case(guards.recompute_flags, _recomputing_call, _phase, _recompute),
    Case(guards.sequence_statistics, _counted_call, _counts, _count),
    Case(guards.activation_logs, _saving_call, _saved, _save),
    Case(guards.straggler_timer, _straggling_call, _timer, _time_data),
    Case(guards.nvtx_ranges, _profiled_call, _ranges, _profile),
    *(
        [Case(guards.router_random, _biased_call, _biases, _draw_bias, variant="biases")]
        if hasattr(moe_utils, "RandomSTEShared")
        else []
    ),
)
