"""Where lengths vary, a stage is warmed with what it is really sent, whatever that is, and the run stays the same."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import wires
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.transformer import TransformerConfig
from pipelines import SMALL, call, pipeline

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import in_warmup, pipeline_warmup
from pp_free_warmup._activations import Neighbours
from pp_free_warmup._call import read_call
from pp_free_warmup._wire import Parcel, Passage, is_wrong, read, text_of, told
from pp_free_warmup.errors import UnsupportedSetup, WarmupFailed
from pp_free_warmup.testing import models, ranks, run_on_ranks
from pp_free_warmup.testing.models import Layout
from pp_free_warmup.testing.parity import Script, differences, plain_step, record

VARIABLE = replace(SMALL, seq=24, micro_batch=2, num_microbatches=4, variable_seq_lengths=True)
LAYOUTS = {
    "two stages": (2, VARIABLE),
    "four stages": (4, replace(VARIABLE, pp=4, layers=4)),
    "tensor parallel": (4, replace(VARIABLE, tp=2)),
    "two replicas": (4, replace(VARIABLE, distributed_optimizer=True)),
    "predictions": (
        4,
        replace(VARIABLE, pp=4, mtp=1, options={"pipeline_model_parallel_layout": "E|tt|m|L"}),
    ),
    "virtual stages": (2, replace(VARIABLE, vp=2, layers=4)),
    "fixed lengths": (2, replace(VARIABLE, variable_seq_lengths=False)),
    "virtual stages, fixed lengths": (2, replace(VARIABLE, vp=2, layers=4, variable_seq_lengths=False)),
}
Made = tuple[list[str], Any]


def _compared(
    layout: Layout,
    kind: type = wires.Sending,
    step: Any = models.forward_step,
    skipped: int = 0,
    around: Callable[[], Any] = nullcontext,
    script: Script = plain_step,
    **keywords: Any,
) -> Made:
    """Train without and with a warmup; return what differs, and the report."""
    blocks = []

    def build(layout: Layout, seed: int) -> Any:
        training = models.build(layout, seed, step=step)
        for iterator in training.iterators:
            for _ in range(skipped):
                next(iterator)
        return training

    def warmed(training: Any) -> Any:
        blocks.append(pipeline_warmup(training.chunks, **keywords))
        return blocks[0]

    with wires.chunks_are(kind), around():
        cold = record(layout, 3, make=build, script=script)
        found = differences(cold, record(layout, 3, around=warmed, make=build, script=script))
    return found, blocks[0].report


def _on_ranks(name: str, *given: Any, **named: Any) -> list[Any]:
    n, layout = LAYOUTS[name]
    made = run_on_ranks(_compared, n, layout, *given, **named)
    assert [found for found, _ in made] == [[]] * n
    return [report for _, report in made]


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["two stages", "four stages", "virtual stages"])
@pytest.mark.parametrize("kind", [wires.Distilling, wires.Streaming, wires.Seeing])
def test_a_wire_of_ones_own_is_warmed_in_a_second_pass(kind, layout):
    """A teacher beside the student, residual streams, image tokens before the text: told by the stage before."""
    for report in _on_ranks(layout, kind):
        assert (report.outcome, report.passes) == ("warmed", 2)
        assert "2 passes" in report.headline()


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["two stages", "four stages"])
@pytest.mark.parametrize("step", [wires.preferring_step, wires.unpaired_step])
def test_a_step_that_divides_what_arrives_is_warmed(step, layout):
    """It divides its input among reference and policy before it calls the model: the second pass has it in place."""
    for report in _on_ranks(layout, step=step, kind=wires.GPTModel):
        assert (report.outcome, report.passes) == ("warmed", 2)


@pytest.mark.ranks
def test_a_stage_that_gets_a_mask_alone_is_warmed():
    """Its first microbatch is shorter than ``seq_length``, and nothing it is given says so but the mask."""
    for report in _on_ranks("four stages", step=wires.masked_step, kind=wires.GPTModel, skipped=1):
        assert (report.outcome, report.passes) == ("warmed", 2)


@pytest.mark.ranks
@pytest.mark.parametrize("nested", [True, False])
def test_ids_that_are_not_yet_packed_do_not_mislead(nested):
    """Later stages that are handed the ids as they were, beside the packing, guess right at once."""
    step = partial(wires.packing_step, nested=nested)
    for report in _on_ranks("two stages", step=step, kind=wires.GPTModel):
        assert (report.outcome, report.passes) == ("warmed", 1)


@pytest.mark.ranks
def test_predictions_behind_the_hidden_states_are_guessed():
    """A stage behind one that predicts takes several hidden states, whose length the batch says as well."""
    if "mtp_standalone" not in TransformerConfig.__dataclass_fields__:
        pytest.skip("predictions in a stage of their own came with 0.16")
    for report in _on_ranks("predictions", wires.GPTModel):
        assert (report.outcome, report.passes) == ("warmed", 1)


def _widened_step(training: Any, schedule: Any, _number: int) -> list[Any]:
    training.zero_grad()
    return list(schedule(**training.schedule_arguments(), adjust_tensor_shapes_fn=wires.widened))


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["two stages", "four stages", "fixed lengths"])
def test_a_wire_that_the_caller_adjusts_is_guessed(layout):
    """``adjust_tensor_shapes_fn`` says how wide student and teacher are together; the batch, how long."""
    for report in _on_ranks(layout, wires.Distilling, script=_widened_step):
        assert (report.outcome, report.passes) == ("warmed", 1)


@pytest.mark.ranks
def test_a_wrong_guess_is_no_failure():
    """``on_failure="raise"`` waits for the second pass before it raises anything."""
    for report in _on_ranks("two stages", wires.Streaming, on_failure="raise"):
        assert (report.outcome, report.passes) == ("warmed", 2)


@pytest.mark.ranks
def test_ranks_that_share_a_stage_pass_again_together():
    """With tensor parallelism, and with two replicas whose batches differ, nobody waits in a collective."""
    for report in _on_ranks("tensor parallel", wires.Seeing) + _on_ranks("two replicas", wires.Seeing):
        assert (report.outcome, report.passes) == ("warmed", 2)


@ranks(2)
def test_a_failure_with_the_right_input_is_not_tried_again():
    """Where the guess was right there is nothing to learn, however many others guessed wrong."""
    training = pipeline(VARIABLE, also=lambda: dist.get_rank() == 0 and in_warmup() and _break())
    with pytest.raises(WarmupFailed, match="rank 0: ValueError: no such kernel"):
        with pipeline_warmup(on_failure="raise"):
            call(training)

    assert training.forward_step.counts == (1, 0)


def _break() -> None:
    raise ValueError("no such kernel")


@pytest.mark.ranks
def test_a_right_guess_takes_one_pass():
    """Plain models with variable lengths are not passed through twice."""
    for report in _on_ranks("virtual stages", kind=wires.GPTModel):
        assert (report.outcome, report.passes) == ("warmed", 1)
        assert "passes" not in report.headline()


# --- wires that the release's own function for shapes describes ---


class _Wider:
    """A Megatron whose stages exchange activations of *dimensions* dimensions, with streams on or in the last axes."""

    def __init__(self, dimensions: int) -> None:
        self._patch = pytest.MonkeyPatch()
        self._dimensions = dimensions

    def __enter__(self) -> None:
        own, streams = schedules.get_tensor_shapes, wires.STREAMS

        def get_tensor_shapes(*, config: Any, **asked: Any) -> Any:
            [[*sizes, hidden]] = own(config=config, **asked) if not config.variable_seq_lengths else [(0, 0, 0)]
            return [(*sizes, streams, hidden) if self._dimensions == 4 else (*sizes, streams * hidden)]

        get_tensor_shapes.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
        self._patch.setattr(schedules, "get_tensor_shapes", get_tensor_shapes)
        self._rewrite(p2p_communication.P2PCommunicator._communicate_shapes, "(3,)", f"({self._dimensions},)", 2)
        sizes = f"{streams}, config.hidden_size" if self._dimensions == 4 else f"{streams} * config.hidden_size"
        interleaved = schedules.forward_backward_pipelining_with_interleaving
        self._rewrite(interleaved, "micro_batch_size, config.hidden_size]", f"micro_batch_size, {sizes}]", 1)

    def _rewrite(self, function: Any, old: str, new: str, times: int) -> None:
        """Put a function whose source has *new* in place of *old* where it is."""
        source, made = textwrap.dedent(inspect.getsource(function)), dict[str, Any]()
        assert source.count(old) == times
        exec(source.replace(old, new), function.__globals__, made)
        *home, name = function.__qualname__.split(".")
        owner = getattr(p2p_communication, home[0]) if home else schedules
        self._patch.setattr(owner, name, made[name])

    def __exit__(self, *_error: object) -> None:
        self._patch.undo()


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["two stages", "virtual stages", "fixed lengths", "virtual stages, fixed lengths"])
@pytest.mark.parametrize(("kind", "dimensions"), [(wires.Stacking, 4), (wires.Streaming, 3)])
def test_dimensions_and_widths_are_the_releases_own(kind, dimensions, layout):
    """Streams on an axis of their own, with four sizes exchanged, or in the last one: right in one pass.

    The interleaved schedule, which writes a fixed shape down itself, is widened as Megatron's branch dev has it.
    """
    for report in _on_ranks(layout, kind, around=partial(_Wider, dimensions)):
        assert (report.outcome, report.passes) == ("warmed", 1)


# --- content ----------------------------------------------------------------------------------------------------------


class _Demanding:
    """Chunks that make one *demand* of what arrives, under anomaly detection."""

    def __init__(self, demand: str) -> None:
        self._demand = demand

    def __enter__(self) -> None:
        wires.Demanding.demand = self._demand
        torch.autograd.set_detect_anomaly(True)

    def __exit__(self, *_error: object) -> None:
        torch.autograd.set_detect_anomaly(False)


def _with_ids(schedule_call: Any, chunk: int) -> Any:
    """Make hidden states and one channel of ids, for a first microbatch of 24 tokens."""
    assert chunk == 0
    hidden = schedule_call.config.hidden_size
    values = torch.rand(24, schedule_call.keywords["micro_batch_size"], hidden + 1)
    values[..., -1] = torch.arange(1, 25)[:, None]
    return values


@pytest.mark.ranks
@pytest.mark.parametrize("demand", wires.DEMANDS)
def test_a_stage_that_random_numbers_do_not_suit_is_gone_on_without(demand):
    """Ids looked up, a mask asserted on, a root under anomaly detection: the run without is the run with."""
    for report in _on_ranks("two stages", wires.Demanding, around=partial(_Demanding, demand)):
        assert report.outcome == "failed"
        assert report.passes == 2
        assert "rank 1 (stage 1): " in report.reason


@pytest.mark.ranks
@pytest.mark.parametrize("demand", wires.DEMANDS)
def test_a_stage_that_random_numbers_do_not_suit_is_warmed_with_activations(demand):
    """What the user makes for it takes their place, in one pass."""
    around = partial(_Demanding, demand)
    for report in _on_ranks("two stages", wires.Demanding, around=around, activations=_with_ids):
        assert (report.outcome, report.passes) == ("warmed", 1)


def _too_short(schedule_call: Any, _chunk: int) -> Any:
    return [torch.rand(5, 2, schedule_call.config.hidden_size)]


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["two stages", "virtual stages"])
def test_activations_of_another_shape_are_refused_after_the_fact(layout):
    """Where lengths vary, what was really sent says that they do not fit; the run goes on without a warmup."""
    for report in _on_ranks(layout, kind=wires.GPTModel, activations=_too_short):
        assert report.outcome == "failed"
        assert "UnsupportedSetup: activations= made something else for chunk" in report.reason
        assert "torch.float32 (5, 2, 16); expected torch.float32 (24, 2, 16)" in report.reason


@ranks(2)
@pytest.mark.parametrize(
    ("made", "found"),
    [
        (torch.zeros(8, 1, 5), "torch.float32 (8, 1, 5)"),
        (torch.zeros(8, 1, 16).double(), "torch.float64 (8, 1, 16)"),
        ([torch.zeros(8, 1, 16)] * 2, "torch.float32 (8, 1, 16), torch.float32 (8, 1, 16)"),
        ("zeros", "str"),
    ],
)
def test_activations_that_do_not_fit_are_refused(made, found):
    """Shape, dtype, number and kind are known where lengths are fixed; the error has all of them."""
    training = pipeline()
    expected = UnsupportedSetup if dist.get_rank() == 1 else WarmupFailed
    with pytest.raises(expected) as raised, pipeline_warmup(activations=lambda *_: made, on_failure="raise"):
        call(training)

    assert f"{found}; expected torch.float32 (8, 1, 16)" in raised.value.found
    assert training.forward_step.real == 0


@ranks(2)
def test_activations_are_asked_for_per_chunk_that_receives():
    """With the call and the chunk's index; None has random numbers made; what is given requires grad."""
    asked, arrived = [], []

    def mine(schedule_call: Any, chunk: int) -> Any:
        asked.append((schedule_call.num_microbatches, chunk))
        return torch.ones(8, 1, 16) if chunk else None

    layout = replace(SMALL, vp=2, layers=4)

    def look(module: Any, _given: Any) -> None:
        if in_warmup():
            arrived.append(module.input_tensor)

    training = pipeline(layout)
    for chunk in training.chunks:
        megatron.unwrapped(chunk).decoder.register_forward_pre_hook(look)
    with pipeline_warmup(activations=mine) as warmup:
        call(training)

    assert warmup.report.outcome == "warmed"
    assert asked == ([(2, 1)] if dist.get_rank() == 0 else [(2, 0), (2, 1)])
    assert arrived[-1].requires_grad
    assert bool((arrived[-1] == 1).all())


# --- what follows from what was seen, without ranks ---


def _load(*sizes: tuple[int, ...], dtype: str = "torch.float32") -> Any:
    return tuple(Parcel(size, dtype) for size in sizes)


SHORT, LONG, WIDE = _load((8, 1, 4)), _load((16, 1, 4)), _load((8, 1, 6))
FIRST = Passage((), SHORT)


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        pytest.param([[FIRST], [Passage(SHORT, LONG)]], [[None], [SHORT]], id="right"),
        pytest.param([[FIRST], [Passage(LONG, None)]], [[None], [SHORT]], id="failed on a wrong one"),
        pytest.param(
            [[FIRST], [Passage(SHORT, WIDE)], [Passage(SHORT, None)]], [[None], [SHORT], [WIDE]], id="seen wins"
        ),
        pytest.param(
            [[FIRST], [Passage(LONG, LONG)], [Passage(LONG, None)]], [[None], [SHORT], [SHORT]], id="inferred"
        ),
        pytest.param([[Passage((), None)], [Passage(LONG, LONG)]], [[None], [None]], id="nobody knows"),
        pytest.param(
            [[FIRST, None], [Passage(LONG, None), None]], [[None, SHORT], [SHORT, SHORT]], id="chunks not reached"
        ),
        pytest.param(
            [[FIRST, Passage(WIDE, SHORT)], [Passage(SHORT, WIDE), Passage(SHORT, ())]],
            [[None, WIDE], [SHORT, SHORT]],
            id="virtual stages",
        ),
        pytest.param(
            [[FIRST], [Passage(LONG, None)], [Passage(LONG, None, parts=2)]],
            [[None], [SHORT], [LONG]],
            id="predictions follow",
        ),
        pytest.param(
            [[FIRST], [Passage(SHORT, LONG)], [Passage(SHORT, None, parts=2)]],
            [[None], [SHORT], [LONG]],
            id="predictions seen",
        ),
        pytest.param(
            [[Passage((), SHORT + WIDE)], [Passage(SHORT, None)]], [[None], [SHORT + WIDE]], id="several tensors"
        ),
        pytest.param(
            [[Passage((), _load((8, 1, 4), dtype="torch.bfloat16"))], [Passage(SHORT, SHORT)]],
            [[None], [_load((8, 1, 4), dtype="torch.bfloat16")]],
            id="another dtype",
        ),
    ],
)
def test_what_a_stage_is_sent_follows_from_what_all_have_seen(notes, expected):
    """A stage that had what it is sent shows what it sends on; else what arrived there is taken to travel on."""
    assert told([read(text_of(rank)) for rank in notes]) == expected


def test_a_stage_is_wrong_only_where_both_sides_are_known():
    """Nothing to compare is no mistake."""
    assert is_wrong(Passage(LONG, None), SHORT)
    assert not is_wrong(Passage(SHORT, None), SHORT)
    assert not is_wrong(None, SHORT)
    assert not is_wrong(Passage(LONG, None), None)


@ranks(2)
def test_several_tensors_on_a_wire_are_all_made():
    """``adjust_tensor_shapes_fn`` says how many arrive; where lengths vary each is as long as the batch."""
    training = pipeline(replace(SMALL, variable_seq_lengths=True))
    arguments = training.schedule_arguments()
    arguments["adjust_tensor_shapes_fn"] = lambda receive, send: ([*receive, (1, 1, 3)], [*send, (1, 1, 3)])
    schedule_call = read_call(SimpleNamespace(__name__="1F1B"), arguments)
    neighbours = Neighbours(schedule_call)
    inputs = neighbours.activations(0)
    owner = megatron.owner_of_input(schedule_call.chunks[0])
    owner.set_input_tensor = lambda _inputs: None
    with neighbours.arriving(0, inputs):
        for hook in list(owner._forward_pre_hooks.values()):
            hook(owner, (), {"input_ids": torch.zeros(2, 5)})
    neighbours.put_out(0, [torch.zeros(1), [torch.zeros(2)]])

    shapes = [tuple(tensor.shape) for tensor in inputs if tensor is not None]
    assert shapes == ([] if dist.get_rank() == 0 else [(5, 2, 16), (5, 2, 3)])
    assert neighbours.passages == [Passage(_load(*shapes), _load((1,), (2,)))]
