"""What is made up for a stage is what its neighbour would have sent: shape, type, and kind of tensor."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import TransformerConfig

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import in_warmup, pipeline_warmup
from pp_free_warmup._activations import Neighbours
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._random import CallerRandom
from pp_free_warmup.testing import models, ranks, run_on_ranks
from pp_free_warmup.testing.models import Layout

SEQ, BATCH, HIDDEN = 48, 3, 8


class Group:
    """A process group as far as a shape depends on it."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def rank(self) -> int:
        """Return this rank's place."""
        return self._rank


def _config(**fields: Any) -> Any:
    config = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, pipeline_dtype=torch.bfloat16)
    for name, value in fields.items():
        setattr(config, name, value)  # past the checks that belong to other features
    return config


def _groups(tensor: int = 1, context: int = 1) -> Any:
    return megatron.Groups(Group(2), Group(tensor), Group(context), (), None)


KEYWORDS = {"seq_length": SEQ, "micro_batch_size": BATCH, "decoder_seq_length": SEQ}
SHAPES = {
    "plain": ({}, _groups(), (SEQ, BATCH, HIDDEN)),
    "context parallel": ({}, _groups(context=2), (SEQ // 2, BATCH, HIDDEN)),
    "tensor parallel": ({}, _groups(tensor=4), (SEQ, BATCH, HIDDEN)),
    "sequence parallel": ({"sequence_parallel": True}, _groups(tensor=4), (SEQ // 4, BATCH, HIDDEN)),
    "both": ({"sequence_parallel": True}, _groups(tensor=4, context=2), (SEQ // 8, BATCH, HIDDEN)),
    "variable": ({"variable_seq_lengths": True}, _groups(), (SEQ, BATCH, HIDDEN)),
}


@pytest.mark.parametrize("interleaved", [False, True], ids=["1F1B", "interleaved"])
@pytest.mark.parametrize("case", SHAPES)
def test_the_shape_is_the_schedules(case, interleaved):
    """Context and sequence parallelism cut the sequence; where lengths vary the call's is a first guess."""
    fields, groups, expected = SHAPES[case]
    found = megatron.receive_shapes(KEYWORDS, _config(**fields), groups, interleaved)
    assert [tuple(shape) for shape in found] == [expected]


def test_a_replaced_function_for_shapes_is_asked(monkeypatch):
    """A model with several residual streams widens the wire, and wants to know group and direction.

    So it does where lengths vary, of which it is not told, and for virtual stages, of which each receives alike.
    """
    asked = []

    def wider(*, seq_length: int, micro_batch_size: int, config: Any, pp_group: Any, is_recv: bool) -> Any:
        assert not config.variable_seq_lengths
        asked.append((pp_group.size(), is_recv))
        return [(seq_length, micro_batch_size, 4 * config.hidden_size)]

    monkeypatch.setattr(schedules, "get_tensor_shapes", wider)

    for config in (_config(), _config(variable_seq_lengths=True)):
        assert megatron.receive_shapes(KEYWORDS, config, _groups(), False) == [(SEQ, BATCH, 4 * HIDDEN)]
        assert megatron.receive_shapes(KEYWORDS, config, _groups(), True) == [(SEQ, BATCH, 4 * HIDDEN)]
    assert asked == [(2, True), (2, False)] * 2  # the first rank sends what its own later chunks receive


def test_a_callers_adjustment_of_shapes_is_applied():
    """``adjust_tensor_shapes_fn`` (distillation sends a teacher's states as well) says what is received."""
    keywords = {**KEYWORDS, "adjust_tensor_shapes_fn": lambda receive, send: ([*receive, (1, 2, 3)], send)}
    assert megatron.receive_shapes(keywords, _config(), _groups(), False) == [(SEQ, BATCH, HIDDEN), (1, 2, 3)]


def _arriving(config: Any, groups: Any, positional: Any, named: Any) -> Any:
    wire = megatron.receive_shapes(KEYWORDS, config, groups, False)
    return megatron.arriving_shapes(wire, KEYWORDS, config, groups, positional, named)


ARRIVING = {
    "packed": (torch.zeros(1, 40, dtype=torch.long), {}, (40, 1, HIDDEN)),
    "batched": (torch.zeros(BATCH, 40, dtype=torch.long), {}, (40, BATCH, HIDDEN)),
    "sequence parallel": (torch.zeros(1, 40, dtype=torch.long), {"sequence_parallel": True}, (10, 1, HIDDEN)),
    "no tokens": (None, {}, (SEQ, BATCH, HIDDEN)),
    "embeddings": (torch.zeros(40, 1, HIDDEN), {}, (SEQ, BATCH, HIDDEN)),
}


@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
@pytest.mark.parametrize("case", ARRIVING)
def test_the_batch_says_how_long_the_activation_is(case, by_name):
    """Where lengths vary the token ids that the model gets decide, however they are passed."""
    ids, fields, expected = ARRIVING[case]
    positional, named = ((), {"input_ids": ids}) if by_name else ((ids,), {})
    assert _arriving(_config(**fields), _groups(tensor=4), positional, named) == [expected]


TOKENS, ENDS = torch.zeros(2, 40), torch.tensor([0, 24, 40])
NESTED = torch.nested.nested_tensor([torch.arange(24), torch.arange(16)], layout=torch.jagged)
WITHOUT_IDS = {
    "labels": ({"labels": TOKENS}, (40, 2, HIDDEN)),
    "positions": ({"position_ids": TOKENS}, (40, 2, HIDDEN)),
    "rotary positions": ({"position_ids": TOKENS[None]}, (SEQ // 2, BATCH, HIDDEN)),
    "packed": ({"packed_seq_params": SimpleNamespace(cu_seqlens_q=ENDS)}, (20, 1, HIDDEN)),
    "packed and padded": (
        {"packed_seq_params": SimpleNamespace(cu_seqlens_q=ENDS, cu_seqlens_q_padded=ENDS + 8)},
        (24, 1, HIDDEN),
    ),
    "packed beside dense ids": (
        {"packed_seq_params": SimpleNamespace(cu_seqlens_q=ENDS), "input_ids": torch.zeros(2, 24)},
        (20, 1, HIDDEN),
    ),
    "nested ids": ({"input_ids": NESTED}, (20, 1, HIDDEN)),
    "packed beside nested ids": (
        {"packed_seq_params": SimpleNamespace(cu_seqlens_q=ENDS + 8), "input_ids": NESTED},
        (24, 1, HIDDEN),
    ),
    "nothing": ({"attention_mask": None}, (SEQ // 2, BATCH, HIDDEN)),
}


@pytest.mark.parametrize("case", WITHOUT_IDS)
def test_without_token_ids_the_next_best_says_how_long(case):
    """Labels and positions are cut for context parallelism already; the ends of sequences and the call's length not."""
    named, expected = WITHOUT_IDS[case]
    groups = _groups(context=2)
    assert _arriving(_config(), groups, (None,), {"input_ids": None, **named}) == [expected]


@ranks(2)
def test_it_is_random_of_the_right_kind_and_draws_from_nobody() -> None:
    """A leaf that requires grad in the pipeline's dtype; the caller's random numbers do not move."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    config = _config()
    call = ScheduleCall(
        keywords=KEYWORDS,
        chunks=(torch.nn.Linear(2, 2),),
        iterators=(None,),
        config=config,
        groups=megatron.groups_of({}),
        interleaved=False,
        random=CallerRandom(),
    )
    before = torch.get_rng_state()
    neighbours = Neighbours(call)
    [made] = neighbours.activations(0)
    gradients = neighbours.gradients([torch.zeros(2, 3), None])

    assert torch.equal(before, torch.get_rng_state())
    if dist.get_rank() == 0:
        assert made is None
    else:
        assert (tuple(made.shape), made.dtype, made.is_leaf, made.requires_grad) == (
            (SEQ, BATCH, HIDDEN),
            torch.bfloat16,
            True,
            True,
        )
        assert made.unique().numel() > 100
    assert gradients[0].shape == (2, 3)
    assert gradients[1] is None


def _sparing_step(iterator: Any, chunk: Any) -> tuple[Any, Any]:
    """Hand each stage only what it needs: tokens to the first, labels to the last."""
    batch = next(iterator)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    tokens = (batch["tokens"], batch["position_ids"]) if first else (None, None)
    output = chunk(*tokens, None, labels=batch["labels"] if last else None)
    return output, partial(models.token_loss, batch["loss_mask"])


def _arrivals(layout: Layout, step: Any = models.forward_step) -> list[tuple[Any, ...]]:
    """Take a warmed step; return what each chunk was given, in the pass and first in the real step."""
    training = models.build(layout, step=step)
    seen: dict[tuple[int, bool], Any] = {}

    def look(number: int, decoder: Any) -> None:
        arrived = decoder.input_tensor
        facts = arrived if arrived is None else (tuple(arrived.shape), arrived.dtype, arrived.requires_grad)
        seen.setdefault((number, in_warmup()), facts)

    for number, chunk in enumerate(training.chunks):
        decoder = megatron.unwrapped(chunk).decoder
        decoder.register_forward_pre_hook(lambda module, *_, number=number: look(number, module))
    with pipeline_warmup(training.chunks):
        training.step()
    return [(seen[number, True], seen[number, False]) for number in range(len(training.chunks))]


LAYOUTS = {
    "plain": (2, Layout(layers=2)),
    "bf16": (2, Layout(layers=2, bf16=True)),
    "virtual stages": (2, Layout(vp=2)),
    "variable lengths": (2, Layout(layers=2, variable_seq_lengths=True)),
    "predictions in a stage of their own": (
        4,
        Layout(pp=4, layers=2, mtp=1, options={"pipeline_model_parallel_layout": "E|tt|m|L"}),
    ),
}


@pytest.mark.ranks
def test_labels_alone_say_how_long_the_activation_is():
    """Where lengths vary and a last stage gets no tokens, the pass still has the real step's shape there."""
    _, [(made_up, real)] = run_on_ranks(_arrivals, 2, Layout(layers=2, variable_seq_lengths=True), _sparing_step)

    assert made_up == real
    assert real is not None


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_pass_is_given_what_the_real_step_is_given(name):
    """On every stage and chunk the made-up activation has the real one's shape, dtype and need for a gradient."""
    n, layout = LAYOUTS[name]
    if layout.mtp and "mtp_standalone" not in TransformerConfig.__dataclass_fields__:
        pytest.skip("predictions in a stage of their own came with 0.16")
    for rank, chunks in enumerate(run_on_ranks(_arrivals, n, layout)):
        for number, (made_up, real) in enumerate(chunks):
            assert made_up == real, f"rank {rank}, chunk {number}"
            assert (real is None) is (rank == 0 and number == 0)
