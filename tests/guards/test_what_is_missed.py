"""What goes wrong without a guard ("Missed by"), shown with Megatron's own code, and does not with it."""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from contextlib import ExitStack, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformer_engine_like as te_like
from case import alone, call_of, with_fields
from cases_of_features import MOE, OFFLOAD, plain, real
from megatron.core import parallel_state, utils
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import shared_experts
from megatron.core.transformer.transformer_config import TransformerConfig

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import _preflight, guards
from pp_free_warmup._undo import swapped
from pp_free_warmup.testing import cuda_on_cpu

with_and_without = pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])


@pytest.fixture
def stack():
    """Undo what a test changes."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def one_rank(stack):
    """Be the only rank, with Megatron's groups and a "GPU"."""
    stack.enter_context(alone())
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        stack.callback(parallel_state.destroy_model_parallel)
    stack.enter_context(cuda_on_cpu())


def during(guard, call, guarded):
    """Return the guard's block, or for the control an empty one."""
    return guard(call) if guarded else nullcontext()


def plain_config(**fields):
    """Make a small config, and set fields on it that its constructor would want a GPU for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    vars(config).update(fields)
    return config


# --- fp8_state ---


def _fp8_run(version, warm, guarded=True):
    """Run two steps of two models, after one step of training in the second; return what is left."""
    with te_like.loaded(version) as manager:
        model, other = torch.nn.Sequential(te_like.Layer(), te_like.Operation()), te_like.Layer()
        te_like.autocast(manager, [other], torch.ones(2))
        if warm:
            with during(with_fields(guards.fp8_state), call_of(model), guarded):
                te_like.autocast(manager, model, torch.full((2,), 90.0))
        outputs = [te_like.autocast(manager, [*model, other], torch.full((2,), step)) for step in (1.0, 5.0)]
        state = te_like.state_of(manager)
        histories = [h for lists in state.global_amax_history_buffer.values() for h in lists]
        scales = [scale for lists in state.global_scale_buffer.values() for scale in lists]
        return [tensor.clone() for tensor in (*outputs, *histories, *scales)]


@pytest.mark.parametrize("version", [(2, 8), (2, 14), (2, 20)], ids=str)
def test_fp8_numbers_equal_a_cold_run(version):
    """Outputs, amax histories and scales of a warmed run equal a cold one's, another model's included."""
    cold = _fp8_run(version, warm=False)
    warmed = _fp8_run(version, warm=True)
    leaking = _fp8_run(version, warm=True, guarded=False)

    assert len(cold) == len(warmed)
    assert all(map(torch.equal, cold, warmed))
    assert not all(map(torch.equal, cold, leaking))


# --- cuda_graphs ---


class Doubling(MegatronModule):
    """A layer that Megatron can capture."""

    def __init__(self, config):
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.full((1,), 2.0))

    def forward(self, hidden_states):
        return hidden_states * self.weight


def _graphed_layer(stack):
    """Build a layer with Megatron's own local graph manager, whose mempool and tracker need a GPU."""
    tracker = SimpleNamespace(is_inference_rng_tracker=True)
    stack.enter_context(swapped(cuda_graphs, "get_cuda_rng_tracker", lambda: tracker))
    stack.enter_context(swapped(torch.cuda, "graph_pool_handle", lambda: (0, 1)))
    stack.enter_context(swapped(torch.cuda, "get_device_capability", lambda: (9, 0)))
    stack.enter_context(swapped(cuda_graphs.CudaGraphManager, "global_mempool", None))
    stack.enter_context(swapped(cuda_graphs._CudagraphGlobalRecord, "cudagraph_record", []))
    stack.callback(getattr(cuda_graphs._CudagraphGlobalRecord, "_disable_saved_tensors_observer", lambda: None))
    stack.enter_context(swapped(cuda_graphs, "_determine_if_first_last_layer_of_this_vp_chunk", lambda _: (True, True)))
    layer = Doubling(plain_config(cuda_graph_impl="local", enable_cuda_graph=True))
    return layer, cuda_graphs.CudaGraphManager(layer.config)


@pytest.mark.usefixtures("one_rank")
@with_and_without
def test_the_pass_records_no_graph(guarded, stack):
    """A layer with a graph manager runs eager in the pass: nothing is recorded, and gradients flow."""
    layer, manager = _graphed_layer(stack)
    with during(guards.cuda_graphs, call_of(layer), guarded):
        output = manager(layer, (), {"hidden_states": torch.ones(2, requires_grad=True)})
    output = output[0] if isinstance(output, tuple) else output
    output.sum().backward()

    assert output.tolist() == [2.0, 2.0]
    assert layer.weight.grad.tolist() == [2.0]
    assert len(cuda_graphs._CudagraphGlobalRecord.cudagraph_record) == (0 if guarded else 2)
    assert len(manager.cudagraph_runners) == (0 if guarded else 1)


def test_a_graphed_method_runs_eager_too():
    """A manager that wraps a method of its module (0.16 on) calls that method."""
    manager = torch.nn.Module()
    manager.func = lambda value, *, plus: value + plus
    with guards.cuda_graphs(call_of(plain())):
        answer = cuda_graphs.CudaGraphManager.__call__(manager, plain(), (1,), {"plus": 2}, cache_key=None)

    assert answer == 3


# --- activation_offload, paged_stash ---


@pytest.mark.skipif(real(OFFLOAD) is None, reason="fine-grained offloading came with 0.16")
@with_and_without
def test_offloading_learns_no_plan_from_the_pass(guarded, stack):
    """A chunk in the pass makes no handler, so that what it computes passes through the hooks as it is."""
    offload = real(OFFLOAD)
    stack.enter_context(cuda_on_cpu())
    manager = offload.PipelineOffloadManager()
    stack.enter_context(swapped(offload.PipelineOffloadManager, "OFFLOAD_MGR", manager))
    interface = offload.FineGrainedActivationOffloadingInterface
    tensor = torch.ones(2)
    with during(with_fields(guards.activation_offload), call_of(plain()), guarded):
        offload.PipelineOffloadManager.get_instance().init_model_chunk_offload_handler(*_first_of_two_chunks())
        started = offload.fine_grained_offloading_group_start(tensor, "layer")
        if guarded:
            with interface(True, tensor, "layer") as inside:
                assert inside is tensor

    assert (started is tensor) is guarded
    assert len(manager._cached_chunks_forward) == (0 if guarded else 1)
    assert offload.PipelineOffloadManager.get_instance() is manager


@pytest.mark.skipif(real(OFFLOAD) is None, reason="fine-grained offloading came with 0.16")
@with_and_without
def test_the_offload_manager_of_the_pass_empties_no_cache(guarded, stack, monkeypatch):
    """Its pool would call ``empty_cache`` whenever the collector finds it; the run's own manager still may."""
    offload, emptied = real(OFFLOAD), []
    gc.collect()  # other tests' managers
    stack.enter_context(cuda_on_cpu())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    stack.enter_context(swapped(offload.PipelineOffloadManager, "OFFLOAD_MGR", None))
    with during(with_fields(guards.activation_offload), call_of(plain()), guarded):
        offload.PipelineOffloadManager.get_instance()
    if not guarded:
        offload.PipelineOffloadManager.OFFLOAD_MGR = None
    gc.collect()

    assert emptied == ([] if guarded else [1])


def _first_of_two_chunks():
    """Return the arguments of the first of two virtual stages: pp_rank came with 0.19."""
    handler = vars(real(OFFLOAD).PipelineOffloadManager)["init_model_chunk_offload_handler"]
    leading = (0,) if "pp_rank" in handler.__code__.co_varnames else ()
    return (*leading, 2, 0)


@pytest.mark.skipif(real(f"{MOE}.paged_stash") is None, reason="paged stashing came with 0.18")
@with_and_without
def test_stashing_learns_no_schedule_from_the_pass(guarded, stack):
    """A chunk in the pass neither counts as a microbatch nor stashes its activations."""
    stash = real(f"{MOE}.paged_stash")
    stack.enter_context(cuda_on_cpu())
    manager = stash.PagedStashManager()
    manager.enabled, manager.status = True, "capture"
    stack.enter_context(swapped(stash.PagedStashManager, "STASH_MGR", manager))
    tensor = torch.ones(2)
    with during(guards.paged_stash, call_of(plain()), guarded):
        stash.paged_stash_init_chunk_handler(1, 0)
        started = stash.paged_stash_group_start(tensor)

    assert (started is tensor) is guarded
    assert manager.current_microbatch == (None if guarded else [1])


# --- deferred_wgrad ---


@pytest.mark.usefixtures("one_rank")
@with_and_without
def test_the_step_finds_as_many_gradients_as_activations(guarded, stack):
    """Megatron clears one of the two lists before a step; a leftover in the other ends the step."""
    call = _deferring_model()
    model = call.chunks[0]
    with during(guards.fields, call, guarded):
        model(torch.ones(2, 1, 4, requires_grad=True)).sum().backward()
    schedules.clear_embedding_activation_buffer(call.config, [model], True)
    model(torch.ones(2, 1, 4, requires_grad=True)).sum().backward()

    kept = (model.embedding_activation_buffer, model.grad_output_buffer)
    assert [len(buffer) for buffer in kept] == ([1, 1] if guarded else [1, 2])
    if not guarded:  # with equal lists it goes on to a fused kernel, which needs a GPU
        with pytest.raises(AssertionError, match="need to be equal"):
            utils.drain_embedding_wgrad_compute(call.config, *kept, model.output_layer.weight, None)


class Deferring(torch.nn.Module):
    """A last stage: an output layer that shares its two lists with the model."""

    def __init__(self, config):
        super().__init__()
        self.config, self.share_embeddings_and_output_weights = config, False
        self.embedding_activation_buffer, self.grad_output_buffer = [], []
        self.output_layer = ColumnParallelLinear(
            4,
            4,
            config=config,
            init_method=torch.nn.init.ones_,
            bias=False,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            embedding_activation_buffer=self.embedding_activation_buffer,
            grad_output_buffer=self.grad_output_buffer,
        )
        self.output_layer.gradient_accumulation_fusion = True  # the constructor wants the kernel that is never run
        self.output_layer.weight.main_grad = torch.zeros(4, 4)
        self.pre_process, self.post_process = False, True

    def forward(self, hidden_states):
        return self.output_layer(hidden_states)[0]


def _deferring_model():
    config = plain_config(defer_embedding_wgrad_compute=True, wgrad_deferral_limit=0, perform_initialization=False)
    return call_of(Deferring(config), config=config)


# --- shared_experts ---


@pytest.mark.skipif(not hasattr(shared_experts, "SharedExpertState"), reason="the state came with 0.18")
@pytest.mark.usefixtures("one_rank")
@with_and_without
def test_shared_experts_are_idle_after_a_pass_that_failed(guarded):
    """A pass that fails between dispatch and combine does not stop the next forward of the same layer."""
    layer = torch.nn.Module()
    layer.config = SimpleNamespace(moe_shared_expert_overlap=True, sequence_parallel=False)
    layer.tp_group, layer.stream = parallel_state.get_tensor_model_parallel_group(), torch.cuda.Stream()
    layer.use_shared_expert_gate, layer.cached_fc1_input = False, None
    layer._overlap_state = shared_experts.SharedExpertState.IDLE
    begin = partial(shared_experts.SharedExpertMLP.pre_forward_comm, layer, wait_current_stream=False)
    with pytest.raises(MemoryError), during(guards.fields, call_of(layer), guarded):
        begin(torch.ones(2, requires_grad=True))
        raise MemoryError

    with nullcontext() if guarded else pytest.raises(AssertionError, match="IDLE"):
        begin(torch.ones(2, requires_grad=True))


# --- qk_clip ---


@pytest.mark.skipif(real("megatron.core.optimizer.qk_clip") is None, reason="QK-clip came with 0.16")
@pytest.mark.usefixtures("one_rank")
@with_and_without
def test_a_made_up_maximum_clips_nothing(guarded):
    """The largest logit that the clip sees is the real step's."""
    attention = plain("current_max_attn_logits")
    layer = torch.nn.Module()
    layer.self_attention = torch.nn.Module()
    layer.self_attention.core_attention = attention
    layer.self_attention.clip_qk = None
    decoder = SimpleNamespace(layers=[layer])
    chunk = SimpleNamespace(module=SimpleNamespace(module=SimpleNamespace(decoder=decoder)))
    with during(guards.fields, call_of(layer), guarded):
        attention.current_max_attn_logits = torch.tensor([500.0])
    old = attention.current_max_attn_logits
    attention.current_max_attn_logits = torch.max(torch.tensor([3.0]), torch.tensor([0.0]) if old is None else old)

    clip_qk = real("megatron.core.optimizer.qk_clip").clip_qk
    assert clip_qk([chunk], log_max_only=True) == (3.0 if guarded else 500.0)


# --- router_trace, activation_logs ---


@pytest.mark.skipif(real(f"{MOE}.router_trace") is None, reason="the tracer came with 0.19")
@with_and_without
def test_the_trace_lacks_the_pass(guarded, stack, tmp_path):
    """Hooks that hold the tracer itself record nothing in the pass, and go on afterwards."""
    trace = real(f"{MOE}.router_trace")
    tracer = trace.RouterTracer(str(tmp_path), max_steps=5, rank=0)
    stack.enter_context(swapped(trace, "_MOE_ROUTER_TRACER", tracer))
    stack.enter_context(cuda_on_cpu())
    hook = tracer.make_hook("decoder.layers.0.mlp.router")
    routed = (torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64))
    with during(guards.router_trace, call_of(plain()), guarded):
        hook(plain(), (torch.ones(2, 4),), routed)
    hook(plain(), (torch.ones(2, 4),), routed)

    assert tracer.step_id == (0 if guarded else 1)
    assert len(tracer.records) == 1
    assert bool((tmp_path / "router_trace_rank0.jsonl").read_text()) is not guarded


@pytest.mark.skipif(real("megatron.training.activation_logging") is None, reason="came with 0.18, in megatron.training")
@with_and_without
def test_saved_activations_lack_the_pass(guarded, stack):
    """Hooks that hold the dict itself leave nothing of the pass in it."""
    logging = real("megatron.training.activation_logging")
    logger = logging.ActivationLogger("folder")
    stack.enter_context(swapped(logging, "_LOGGER", logger))
    model = torch.nn.Linear(2, 2)
    logger.register_activation_hooks([model])
    with during(guards.activation_logs, call_of(model), guarded):
        model(torch.ones(1, 2))

    assert bool(logger._activations_state_dict) is not guarded


# --- what no guard can reach ---


@pytest.mark.parametrize(
    ("module", "attached"),
    [("cached_logits_loss", "_ACTIVE_STUDENT_LOGITS_CAPTURE"), ("logits_saver", "_ACTIVE_LOGITS_SAVER")],
)
def test_distillation_from_cached_logits_is_refused(module, attached, stack):
    """Its position in the teacher's files is out of reach (0.19), so that a run with it is not warmed."""
    name = f"megatron.training.distillation.{module}"
    assert megatron.student_logits_are_captured() is False
    stack.callback(sys.modules.pop, name)
    sys.modules[name] = SimpleNamespace(**{attached: object()})

    assert _preflight.refusal(call_of(plain())).name == "cached-distillation"


# --- loss_scales ---


@pytest.mark.skipif(
    not hasattr(schedules, "_get_experimental_attention_variant_loss_scale_func"), reason="came with 0.19"
)
def test_a_scale_that_the_pass_imports_is_put_back(stack):
    """A stage without such a layer imports the scale in its first forward step; it is imported before."""
    name = f"{MOE.rpartition('.')[0]}.experimental_attention_variant.dsa"
    stack.callback(sys.modules.__setitem__, name, sys.modules.pop(name))
    config = plain_config(experimental_attention_variant="dsa")
    with guards.loss_scales(call_of(plain(), config=config)):
        schedules._get_experimental_attention_variant_loss_scale_func(config)(torch.ones(1))

    assert importlib.import_module(name).DSAIndexerLossAutoScaler.main_loss_backward_scale is None


# --- recompute_flags, straggler_timer, nvtx_ranges ---


@pytest.mark.skipif(not hasattr(megatron_random, "IS_CHECKPOINTING"), reason="the flag came with 0.16")
@with_and_without
def test_a_failed_checkpointed_layer_leaves_no_flag_up(guarded, stack):
    """An error in a checkpointed layer leaves Megatron's flag up, for whoever catches it."""
    stack.enter_context(cuda_on_cpu())
    stack.enter_context(swapped(megatron_random, "IS_CHECKPOINTING", False))
    with pytest.raises(ZeroDivisionError), during(guards.recompute_flags, call_of(plain()), guarded):
        megatron_random.CheckpointFunction.apply(lambda _: 1 // 0, False, torch.ones(1, requires_grad=True))

    assert megatron_random.IS_CHECKPOINTING is not guarded


@with_and_without
def test_no_rank_is_a_straggler_for_compiling(guarded, stack):
    """What a forward step times in the pass is not reported, and the next step times what it means to."""
    stack.enter_context(cuda_on_cpu())
    timer = utils.StragglerDetector()
    stack.callback(timer.__init__)
    timer.start, timer.stop = timer.start_method, timer.stop_method
    with during(guards.straggler_timer, call_of(plain()), guarded):
        with timer(bdata=True):
            pass
        with timer:
            pass

    assert len(timer.start_gemm_tm) == (0 if guarded else 1)
    assert len(timer.start_data_tm) == (0 if guarded else 1)
    assert timer.bdata is False


@with_and_without
def test_a_failed_pass_leaves_no_range_open(guarded, stack):
    """Every range that the pass opened is closed again, in Megatron's list and in the profiler."""
    opened = []
    stack.enter_context(swapped(utils, "_nvtx_range_messages", []))
    stack.enter_context(swapped(utils, "_nvtx_enabled", True))
    stack.enter_context(swapped(torch.cuda.nvtx, "range_push", opened.append))
    stack.enter_context(swapped(torch.cuda.nvtx, "range_pop", opened.pop))
    utils.nvtx_range_push("iteration")
    with pytest.raises(ZeroDivisionError), during(guards.nvtx_ranges, call_of(plain()), guarded):
        utils.nvtx_range_push("layer")
        utils.nvtx_range_push("attention")
        raise ZeroDivisionError

    assert opened == utils._nvtx_range_messages
    assert opened == (["iteration"] if guarded else ["iteration", "layer", "attention"])
