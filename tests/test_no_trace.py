"""State that models and trainers keep in their own ways: a run with the warmup is the run without it."""

from __future__ import annotations

import functools
import queue
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import another_file
import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MLATransformerConfig, multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from pipelines import SMALL, VIRTUAL

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import pipeline_warmup, warm_first_call
from pp_free_warmup._structure import structure_kept
from pp_free_warmup._undo import swapped
from pp_free_warmup.errors import TraceFound, WarmupFailed
from pp_free_warmup.guards import keep_parameters
from pp_free_warmup.testing import _chunks, models, ranks
from pp_free_warmup.testing.models import Layout, Training
from pp_free_warmup.testing.parity import Script, differences, plain_step, record

pytestmark = pytest.mark.ranks

STEPS = 4
Plant = Callable[[Any, Training], None]


def assert_equal(
    make: Callable[[Layout, int], Training], layout: Layout = SMALL, script: Script = plain_step, **options: Any
) -> None:
    """Train without the warmup, again without, and with it; assert on this rank that all agree to the bit."""
    blocks: list[Any] = []

    def around(training: Training) -> Any:
        blocks.append(pipeline_warmup(training.chunks, **options))
        return blocks[-1]

    recorded = functools.partial(record, layout, STEPS, make=make, script=script)
    cold = recorded()
    assert differences(cold, recorded()) == []
    assert differences(cold, recorded(around=around)) == []
    assert blocks[0].report.outcome == "warmed"


def scaling(factor: Callable[[], Any]) -> Any:
    """Return a forward hook that multiplies a layer's output by what *factor* says at each call."""

    def hook(_module: Any, _inputs: Any, output: Any) -> Any:
        return (output[0] * factor(), *output[1:])

    return hook


def planted(plant: Plant, layout: Layout, seed: int) -> Training:
    """Build a training in which *plant* has put something on one layer of each chunk."""
    training = models.build(layout, seed)
    for chunk in training.chunks:
        plant(megatron.unwrapped(chunk).decoder.layers[0].mlp, training)
    return training


# --- what hangs on a module ---


def _counter(layer: Any, _training: Training) -> None:
    layer.calls = 0

    def count() -> float:
        layer.calls += 1
        return 1 + layer.calls / 100

    layer.register_forward_hook(scaling(count))


def _replay(layer: Any, _training: Training) -> None:
    """Replay routes one after the other, as trainers that replay routing do with an object on each router."""
    layer.replay = SimpleNamespace(forward_index=0, log=[], routes=[1 + n / 50 for n in range(99)])

    def route() -> float:
        layer.replay.forward_index += 1
        layer.replay.log.append(layer.replay.forward_index)
        return layer.replay.routes[layer.replay.forward_index]

    layer.register_forward_hook(scaling(route))


def _made_in_the_first_forward(layer: Any, _training: Training) -> None:
    def gate() -> Any:
        if not hasattr(layer, "gate"):
            layer.gate = torch.nn.Linear(1, 1)
        return layer.gate.weight.detach()

    layer.register_forward_hook(scaling(gate))


def _table_beside_its_length(layer: Any, _training: Training) -> None:
    """Keep a table and, beside it, how long it is: one without the other would be too short or missing."""
    layer.rows = 1
    layer.register_buffer("table", torch.ones(1), persistent=False)

    def look_up() -> Any:
        if layer.rows < 4:
            layer.rows = 4
            layer.register_buffer("table", torch.linspace(1, 2, 4), persistent=False)
        return layer.table[-1]

    layer.register_forward_hook(scaling(look_up))


def _lazy_table(layer: Any, _training: Training) -> None:
    """Make the table with the first forward, as newer rotary embeddings do."""
    layer.rows = 0

    def look_up() -> Any:
        if layer.rows < 4:
            layer.rows, layer.table = 4, torch.linspace(1, 2, 4)
        return layer.table[-1]

    layer.register_forward_hook(scaling(look_up))


def _drawing(generator: Any, draw: Callable[[Any], float]) -> Plant:
    def plant(layer: Any, _training: Training) -> None:
        layer.noise = generator()
        layer.register_forward_hook(scaling(lambda: 1 + draw(layer.noise)))

    return plant


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


ON_MODULES: dict[str, Plant] = {
    "counter": _counter,
    "replay object": _replay,
    "submodule of the first forward": _made_in_the_first_forward,
    "table beside its length": _table_beside_its_length,
    "lazy table": _lazy_table,
    "torch's generator": _drawing(_seeded, lambda noise: torch.rand(1, generator=noise)),
    "NumPy's generator": _drawing(lambda: np.random.default_rng(3), lambda noise: float(noise.random())),
    "NumPy's older generator": _drawing(lambda: np.random.RandomState(3), lambda noise: float(noise.rand())),
    "Python's generator": _drawing(lambda: random.Random(3), lambda noise: noise.random()),
}


@pytest.mark.parametrize("kind", ON_MODULES)
@ranks(2)
def test_what_hangs_on_a_module_is_as_before(kind: str) -> None:
    """Counters, replayed routes, lazily made parts and tables, private random numbers."""
    assert_equal(functools.partial(planted, ON_MODULES[kind]))


# --- what the forward step holds ---

NOISE = random.Random(5)
ROUTES: list[int] = []


class Owner:
    """A trainer's object whose method is the forward step."""

    def __init__(self) -> None:
        self.tokens, self.routes, self.stats = 0, [], SimpleNamespace(flops=0.0)
        self.noise = _seeded()

    def step(self, iterator: Any, chunk: Any) -> Any:
        """Count, collect and draw; the loss depends on all of it."""
        self.tokens += 8
        self.routes.append(self.tokens)
        self.stats.flops += 1.5
        factor = 1 + len(self.routes) / 100 + self.stats.flops / 100 + torch.rand(1, generator=self.noise).item()
        output, loss = models.forward_step(iterator, chunk)
        return output * factor, loss

    __call__ = step


def _with_state(state: Any, iterator: Any, chunk: Any) -> Any:
    return state.step(iterator, chunk)


def _wrapping() -> Any:
    inner = Owner().step

    @functools.wraps(inner)
    def step(*arguments: Any) -> Any:
        return inner(*arguments)

    return step


def _closing() -> Any:
    count, noise = 0, np.random.default_rng(4)

    def step(iterator: Any, chunk: Any) -> Any:
        nonlocal count
        count += 1
        output, loss = models.forward_step(iterator, chunk)
        return output * (1 + count / 100 + float(noise.random())), loss

    return step


def _with_globals(iterator: Any, chunk: Any) -> Any:
    ROUTES.append(len(ROUTES))
    output, loss = models.forward_step(iterator, chunk)
    return output * (1 + len(ROUTES) / 100 + NOISE.random()), loss


def _afresh() -> Any:
    ROUTES.clear()
    NOISE.seed(5)
    return _with_globals


def _weighed(iterator: Any, chunk: Any) -> Any:
    """Return a loss that is bound to an object of another file, which no global of this one leads to."""
    output, loss = models.forward_step(iterator, chunk)
    return output, functools.partial(another_file.METER.weigh, loss)


def _weighed_afresh() -> Any:
    another_file.METER = another_file.Meter()
    return _weighed


STEPS_OF_TRAINERS: dict[str, Callable[[], Any]] = {
    "method": lambda: Owner().step,
    "object": Owner,
    "partial": lambda: functools.partial(_with_state, Owner()),
    "partial of a method": lambda: functools.partial(Owner().step),
    "wrapped": _wrapping,
    "closure": _closing,
    "globals": _afresh,
    "loss of another file": _weighed_afresh,
}


@pytest.mark.parametrize("kind", STEPS_OF_TRAINERS)
@ranks(2)
def test_what_a_forward_step_holds_is_as_before(kind: str) -> None:
    """Its object, a partial's arguments, a closure, globals, its loss: counters, lists and private random numbers."""

    def make(layout: Layout, seed: int) -> Training:
        return models.build(layout, seed, step=STEPS_OF_TRAINERS[kind]())

    assert_equal(make)


DEFERRED: queue.Queue[Callable[[], Any]] = queue.Queue()


def _deferring(iterator: Any, chunk: Any) -> Any:
    """Put off a part of each microbatch's backward, as schedules that split it do."""
    weight = next(chunk.parameters())
    DEFERRED.put(lambda: weight.main_grad.add_(1e-2))
    return models.forward_step(iterator, chunk)


def _flushing(training: Training, schedule: Any, number: int) -> list[Any]:
    losses = plain_step(training, schedule, number)
    while not DEFERRED.empty():
        DEFERRED.get()()
    return losses


@ranks(2)
def test_backwards_that_were_put_off_in_the_pass_are_seen() -> None:
    """A queue that threads may fill is left to them; where the pass puts closures into one, verify names it."""
    training = models.build(SMALL, step=_deferring)
    with pytest.raises(TraceFound, match=r"DEFERRED\.queue\[0\]"), pipeline_warmup(training.chunks, verify=True):
        training.step()

    DEFERRED.queue.clear()


@ranks(2)
def test_backwards_that_were_put_off_in_the_pass_are_never_run_where_the_queue_is_kept() -> None:
    """With a guard for it, a queue that is flushed after the schedule has none of the warmup's: gradients are equal."""
    keep = [lambda _call: structure_kept(DEFERRED)]
    assert_equal(functools.partial(models.build, step=_deferring), script=_flushing, extra_guards=keep)


# --- parameters that a forward writes ---


def _codebook(layer: Any, _training: Training) -> None:
    """Follow a moving average, in a parameter that does not train."""
    layer.codebook = torch.nn.Parameter(torch.ones(1), requires_grad=False)

    def follow() -> Any:
        with torch.no_grad():
            layer.codebook.mul_(0.9)
        return layer.codebook.clone()

    layer.register_forward_hook(scaling(follow))


def _step_size(layer: Any, _training: Training) -> None:
    """Set a parameter from the first batch, once."""
    layer.step_size, layer.ready = torch.nn.Parameter(torch.ones(1), requires_grad=False), False

    def size() -> Any:
        if not layer.ready:
            with torch.no_grad():
                layer.step_size.fill_(torch.rand(1).item())
            layer.ready = True
        return layer.step_size

    layer.register_forward_hook(scaling(size))


WRITTEN = {"codebook": _codebook, "step_size": _step_size}


@pytest.mark.parametrize("name", WRITTEN)
@ranks(2)
def test_a_parameter_that_a_forward_writes_is_named(name: str) -> None:
    """The run stops on all ranks, and says which line mends it."""
    training = planted(WRITTEN[name], SMALL, 1)
    with pytest.raises(TraceFound) as raised, pipeline_warmup(training.chunks):
        training.step()

    assert f"{name}" in raised.value.found
    assert f'keep_parameters("{name}")' in raised.value.do


@pytest.mark.parametrize("name", WRITTEN)
@ranks(2)
def test_a_parameter_that_is_kept_is_as_before(name: str) -> None:
    """With that line, the run is the one without a warmup."""
    assert_equal(functools.partial(planted, WRITTEN[name]), extra_guards=[keep_parameters(name)])


@ranks(2)
def test_a_trace_on_one_rank_stops_the_others() -> None:
    """They name the rank and what it found."""
    training = models.build(SMALL)
    if dist.get_rank() == 1:
        _codebook(megatron.unwrapped(training.chunks[0]).decoder.layers[0].mlp, training)
    with pytest.raises((TraceFound, WarmupFailed)) as raised, pipeline_warmup(training.chunks):
        training.step()

    assert "rank 1" in str(raised.value)


# --- log-probs in inference mode ---

QUIET = replace(SMALL, dropout=0.0)
WARMUPS: list[Any] = []


def _log_probs(training: Training, schedule: Any) -> list[Any]:
    with torch.inference_mode():
        seen = schedule(**training.schedule_arguments(forward_only=True))
    return [each.clone() if torch.is_tensor(each) else each for each in seen]


def _log_probs_and_step(training: Training, schedule: Any, number: int) -> list[Any]:
    """Ask for log-probs in inference mode before each step."""
    seen = _log_probs(training, schedule)
    return [*seen, *plain_step(training, schedule, number)]


def _decorated(training: Training, schedule: Any, number: int) -> list[Any]:
    if number == 0:
        schedule = warm_first_call(schedule)
        WARMUPS.append(schedule.warmup)
    return _log_probs_and_step(training, schedule, number)


def _log_probs_before(around: Any) -> Any:
    def after_log_probs(training: Training) -> Any:
        _log_probs(training, get_forward_backward_func())
        return around(training)

    return after_log_probs


def _block(training: Training) -> Any:
    WARMUPS.append(pipeline_warmup(training.chunks))
    return WARMUPS[-1]


def _no_block(_training: Training) -> Any:
    return nullcontext()


FORMS = {
    "inside a block": ((_log_probs_and_step, _no_block), (_log_probs_and_step, _block)),
    "before a block": ((plain_step, _log_probs_before(_no_block)), (plain_step, _log_probs_before(_block))),
    "decorated": ((_log_probs_and_step, _no_block), (_decorated, _no_block)),
}


@pytest.mark.parametrize("layout", [QUIET, replace(VIRTUAL, dropout=0.0)], ids=["pp2", "vpp2"])
@pytest.mark.parametrize("form", FORMS)
@ranks(2)
def test_log_probs_in_inference_mode_leave_training_as_it_is(layout: Layout, form: str) -> None:
    """What they left behind are inference tensors, which nobody may write to elsewhere."""
    cold, warmed = (record(layout, STEPS, script=script, around=around) for script, around in FORMS[form])

    kinds = ["training"] if form == "before a block" else ["forward-only", "training"]
    assert differences(cold, warmed) == []
    assert [(each.kind, each.outcome) for each in WARMUPS.pop().reports] == [(kind, "warmed") for kind in kinds]


# --- multi-latent attention with YaRN, fused ---

LATENT = {
    "multi_latent_attention": True,
    "apply_rope_fusion": True,
    "rotary_scaling_factor": 4,
    "original_max_position_embeddings": 16,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 12,
    "kv_channels": 12,
    "normalization": "RMSNorm",
}
LONGER = replace(SMALL, seq=32, options={name: value for name, value in LATENT.items() if name != "apply_rope_fusion"})


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate by the row of each position; a table that is too short has its last row read again and again."""
    rows = torch.arange(len(states)).clamp(max=len(cos) - 1)
    turned = torch.cat((-states[..., states.shape[-1] // 2 :], states[..., : states.shape[-1] // 2]), dim=-1)
    return states * cos[rows] + turned * sin[rows]


def _query(states: torch.Tensor, cos: Any, sin: Any, plain: int, rotary: int, *_more: Any, **_named: Any) -> Any:
    """Stand in for the fused kernel of queries (megatron/core/fusions/fused_mla_yarn_rope_apply.py)."""
    return torch.cat((states[..., :plain], _rotated(states[..., plain:], cos, sin)), dim=-1)


def _key_and_value(
    states: torch.Tensor, position: Any, cos: Any, sin: Any, rotary: int, plain: int, value: int, *_: Any, **_named: Any
) -> Any:
    """Stand in for the fused kernel of keys and values."""
    heads = _rotated(position, cos, sin).expand(*states.shape[:-1], rotary)
    return torch.cat((states[..., :plain], heads), dim=-1), states[..., plain : plain + value].contiguous()


class Attention(DotProductAttention):
    """Megatron's own attention, which is not told the channels that it has anyway."""

    def __init__(self, config: Any, *arguments: Any, k_channels: int = 0, v_channels: int = 0, **named: Any) -> None:
        with swapped(config, "context_parallel_size", 1):  # each rank attends to its own part of the sequence
            super().__init__(config, *arguments, **named)


def _latent(layout: Layout, seed: int) -> Training:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_chunks, "TransformerConfig", MLATransformerConfig)
        spec = gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True)
        spec.submodules.self_attention.submodules.core_attention = Attention
        patch.setattr(_chunks, "_layer_spec", lambda *_: spec)
        training = models.build(layout, seed)
    training.config.apply_rope_fusion = True  # its own check asks for Transformer Engine, whose kernels are replaced
    return training


@contextmanager
def _fused() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_latent_attention, "TELinear", Attention, raising=False)  # a class to compare with
        patch.setattr(multi_latent_attention, "fused_apply_mla_rope_for_q", _query)
        patch.setattr(multi_latent_attention, "fused_apply_mla_rope_for_kv", _key_and_value)
        yield


@ranks(2)
def test_yarn_tables_are_as_long_as_the_sequence() -> None:
    """A table longer than the original one is made in the pass, and must not leave its length behind."""
    with _fused():
        assert_equal(_latent, LONGER)


# The original table is longer than the sequence, and of another dtype: the first forward makes one of 32 positions.
SHARED = replace(
    LONGER,
    bf16=True,
    options={**LONGER.options, "original_max_position_embeddings": 64, "context_parallel_size": 2},
)


def _own_part(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut the sequence in four; a rank has one part from the front and its counterpart from the back."""
    rank = parallel_state.get_context_parallel_rank()
    parts = {name: value.chunk(4, dim=1) for name, value in batch.items()}
    return {name: torch.cat([part[rank], part[3 - rank]], dim=1) for name, part in parts.items()}


def _latent_in_parts(built: list[Training], layout: Layout, seed: int) -> Training:
    with pytest.MonkeyPatch.context() as patch:
        start = functools.partial(parallel_state.initialize_model_parallel, context_parallel_size=2)
        patch.setattr(parallel_state, "initialize_model_parallel", start)
        training = _latent(layout, seed)
    training.iterators = [None if each is None else map(_own_part, each) for each in training.iterators]
    built.append(training)
    return training


@ranks(4)
def test_yarn_positions_are_those_of_the_ranks_part_of_the_sequence() -> None:
    """With context parallelism a rank's table has the first and the last part that are its own."""
    built: list[Training] = []
    with _fused():
        assert_equal(functools.partial(_latent_in_parts, built), SHARED)
    [rotary] = {module for module in built[-1].chunks[0].modules() if isinstance(module, YarnRotaryEmbedding)}
    rank = parallel_state.get_context_parallel_rank()
    own = [*range(8 * rank, 8 * rank + 8), *range(24 - 8 * rank, 32 - 8 * rank)]
    angles, scale = rotary.get_emb(32)

    assert torch.equal(rotary.cos_cached, (angles[own].cos() * scale).bfloat16())
