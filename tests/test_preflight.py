"""Every reason not to warm a call, each from facts of the call alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import TransformerConfig
from pipelines import SMALL, VIRTUAL, call, pipeline

from pp_free_warmup import _megatron as megatron
from pp_free_warmup import _preflight, pipeline_warmup, warm_first_call
from pp_free_warmup._call import ScheduleCall, read_call
from pp_free_warmup._random import CallerRandom
from pp_free_warmup.testing import models, ranks, run_on_ranks
from pp_free_warmup.testing._chunks import build_chunks


class Group:
    """A process group as far as a check looks at it."""

    def __init__(self, size: int = 2) -> None:
        self._size = size

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size


class MultiModulePipelineCommunicator:
    """Stands for the communicator of a pipeline over several modules (0.17 on)."""


class FullyShardedDataParallel(torch.nn.Module):
    """Stands for Megatron-FSDP's wrapper, which is known by its name."""


class FsdpModule(torch.nn.Module):
    """Stands for the base that Megatron-FSDP mixes into every module that it shards (main, 2026-08)."""


class Sharded(FullyShardedDataParallel):
    """A user's subclass of it."""


def _config(**fields: Any) -> Any:
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, pipeline_dtype=torch.float32)
    for name, value in fields.items():
        setattr(config, name, value)  # past the checks that belong to other features
    return config


def _call(*modules: torch.nn.Module, config: Any = None, iterator: Any = None, groups: Any = None, **words: Any) -> Any:
    chunks = modules or (torch.nn.Linear(2, 2),)
    return ScheduleCall(
        keywords={"data_iterator": iterator, "num_microbatches": 2, **words},
        chunks=chunks,
        iterators=(iterator,) * len(chunks),
        config=_config() if config is None else config,
        groups=groups or megatron.Groups(Group(), Group(1), Group(1), (Group(1),), None),
        interleaved=len(chunks) > 1,
        random=CallerRandom(),
    )


def _with_model_type(name: str) -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    module.model_type = SimpleNamespace(name=name)  # type: ignore[assignment]
    return module


REFUSED = {
    "encoder-decoder": lambda: _call(_with_model_type("encoder_and_decoder")),
    "megatron-fsdp": lambda: _call(torch.nn.Sequential(FullyShardedDataParallel())),
    "te-cpu-offload": lambda: _call(config=_config(cpu_offloading=True)),
    "weight-remat": lambda: _call(config=_config(gtp_weight_remat_size=2)),
    "ncclep": lambda: _call(config=_config(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="ncclep")),
    "ring-exchange": lambda: _call(config=_config(use_ring_exchange_p2p=True)),
    "lazy-parameters": lambda: _call(torch.nn.LazyLinear(2)),
    "meta-parameters": lambda: _call(torch.nn.Linear(2, 2, device="meta")),
    "no-pipeline-dtype": lambda: _call(config=_config(pipeline_dtype=None)),
    "unreadable-iterator": lambda: _call(iterator=[1, 2]),
}
UNVOTED = {
    "multi-module": lambda: _call(
        groups=megatron.Groups(None, Group(), Group(), (Group(),), MultiModulePipelineCommunicator())
    ),
    "no-stage-groups": lambda: _call(groups=megatron.Groups(Group(), Group(), Group(), (), None)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_a_vote(name):
    """One stage may see it alone, so it is a reason to vote with; id, text and way out are there."""
    refused = _preflight.refusal(REFUSED[name]())

    assert refused is not None
    assert refused.name == name
    assert refused.text
    assert refused.do
    assert _preflight.nobody_to_ask(REFUSED[name]()) is None


@pytest.mark.parametrize("name", UNVOTED)
def test_what_is_refused_without_a_vote(name):
    """Where there is nobody to vote with, every rank sees the same."""
    refused = _preflight.nobody_to_ask(UNVOTED[name]())

    assert refused is not None
    assert refused.name == name


@pytest.mark.parametrize(
    "made",
    [
        lambda: _call(),
        lambda: _call(iterator=iter([1])),
        lambda: _call(config=_config(gtp_weight_remat_size=1)),
        lambda: _call(config=_config(cpu_offloading=False)),
        lambda: _call(_with_model_type("encoder_or_decoder"), torch.nn.Linear(2, 2)),
    ],
    ids=["plain", "with an iterator", "a size of one", "a feature that is off", "two chunks"],
)
def test_what_is_not_refused(made):
    """An ordinary call has nothing against it."""
    assert _preflight.refusal(made()) is None
    assert _preflight.nobody_to_ask(made()) is None


@pytest.mark.parametrize(
    "kind",
    [
        Sharded,
        type("FullyShardedDataParallelV1", (torch.nn.Module,), {}),
        type("FullyShardedDataParallelV2", (torch.nn.Module,), {}),
        type("ExperimentalFsdpLinear", (FsdpModule,), {}),
    ],
)
def test_a_sharding_wrapper_is_refused_by_any_of_its_names(kind):
    """A wrapper is known by any name in its ancestry, those of Megatron's main included, and named as it is."""
    refused = _preflight.refusal(_call(kind()))

    assert refused is not None
    assert refused.text.startswith(f"the model is wrapped in {kind.__name__}, ")


@pytest.mark.parametrize(("choice", "refused"), [("refuse", True), ("allow", False), (None, False)])
def test_an_untested_release_is_refused_where_that_is_asked_for(choice, refused, monkeypatch):
    """By name, as every other refusal, and only if the environment says so."""
    monkeypatch.setattr(megatron, "untested_release", lambda: "0.99.0")
    if choice is None:
        monkeypatch.delenv("PP_FREE_WARMUP_UNTESTED", raising=False)
    else:
        monkeypatch.setenv("PP_FREE_WARMUP_UNTESTED", choice)
    found = _preflight.refusal(_call())

    assert (found is not None) == refused
    assert found is None or (found.name, "0.99.0" in found.text) == ("untested-megatron", True)


def test_a_tested_release_is_never_refused_as_untested(monkeypatch):
    """Whoever refuses untested releases still gets the tested ones warmed."""
    monkeypatch.setattr(megatron, "untested_release", lambda: "")
    monkeypatch.setenv("PP_FREE_WARMUP_UNTESTED", "refuse")

    assert _preflight.refusal(_call()) is None


@pytest.mark.parametrize("field", _preflight.REFUSED_FIELDS)
def test_every_refused_field_is_looked_at(field):
    """A field alone is enough, whichever it is."""
    refused = _preflight.refusal(_call(config=_config(**{field: 2})))

    assert refused is not None
    assert refused.text.startswith(f"config.{field}=2: ")


def test_the_first_reason_is_given():
    """Of several reasons one is named, in a fixed order."""
    found = _preflight.refusal(_call(torch.nn.Linear(2, 2, device="meta"), iterator=[1]))

    assert found is not None
    assert found.name == "meta-parameters"


def test_a_field_of_the_config_is_shown_with_its_value():
    """The user finds in the reason what to change."""
    refused = _preflight.refusal(_call(config=_config(cpu_offloading=True)))

    assert refused is not None
    assert refused.text.startswith("config.cpu_offloading=True: ")


def _schedule() -> None:
    """Stand for a pipeline schedule."""


def forward_backward_no_pipelining() -> None:
    """Stand for the schedule without a pipeline."""


@pytest.mark.parametrize(
    ("schedule", "size", "microbatches", "reason"),
    [
        (_schedule, 2, 2, ""),
        (_schedule, 1, 2, "the pipeline has one stage"),
        (_schedule, 2, 0, ""),
        (forward_backward_no_pipelining, 2, 2, "the schedule has no pipeline"),
    ],
)
def test_when_there_is_nothing_to_do(schedule, size, microbatches, reason):
    """These are alike on all ranks by their nature, and leave the kind open."""
    words = {"p2p_communicator": SimpleNamespace(pp_group=Group(size)), "num_microbatches": microbatches}

    assert _preflight.nothing_to_do(schedule, words) == reason


def test_nothing_is_warmed_while_a_graph_is_captured(monkeypatch):
    """A capture would record the warmup's kernels."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    words = {"p2p_communicator": SimpleNamespace(pp_group=Group()), "num_microbatches": 2}

    assert _preflight.nothing_to_do(_schedule, words) == "a CUDA graph is being captured"


@ranks(2)
def test_a_call_without_microbatches_leaves_the_kind_open():
    """The schedule runs as it is, and the next call, which has some, is warmed."""
    training = pipeline()
    schedule = warm_first_call(_counts_microbatches)
    call(training, schedule, num_microbatches=0)
    first = schedule.warmup.report
    call(training, schedule)

    told = "rank 0: the call has no microbatches; rank 1: the call has no microbatches"
    assert (first.outcome, first.reason) == ("skipped", told)
    assert schedule.warmup.report.outcome == "warmed"


def _counts_microbatches(
    *, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, **more
) -> Any:
    """Stand for a schedule that takes any number of microbatches."""
    return num_microbatches


@ranks(2)
def test_a_refused_feature_in_a_real_run():
    """The run goes on without a warmup, on every rank, and the reason carries the feature's id."""
    training = pipeline()
    training.config.cpu_offloading = True  # the local layers do not look at it
    with pipeline_warmup() as warmup:
        call(training)
    training.config.cpu_offloading = False
    call(training)

    assert training.forward_step.counts == (0, 2 * SMALL.num_microbatches)
    assert warmup.report.reason.count("[te-cpu-offload]") == 2


LAYOUTS = {
    "virtual": VIRTUAL,
    "virtual, experts": replace(VIRTUAL, moe=True),
    "virtual, predicting": replace(VIRTUAL, mtp=1),
    "ends of their own": replace(SMALL, pp=4, options={"pipeline_model_parallel_layout": "E|t|t|L"}),
    "virtual, ends of their own": replace(VIRTUAL, layers=2, options={"pipeline_model_parallel_layout": "E|t|t|L"}),
    "virtual, predicting under a layout": replace(
        VIRTUAL, layers=3, mtp=1, options={"pipeline_model_parallel_layout": "Et|t|t|mL"}
    ),
    "predicting in a stage of its own": replace(
        SMALL, pp=4, mtp=1, options={"pipeline_model_parallel_layout": "E|tt|m|L"}
    ),
}


def _placed(name: str, headless: bool) -> str:
    layout = LAYOUTS[name]
    if layout.mtp and layout.options and "mtp_standalone" not in TransformerConfig.__dataclass_fields__:
        return "this release cannot"
    models.parallel(layout.pp, layout.vp)
    chunks = build_chunks(layout)  # without an optimizer, which is no matter here
    training = models.Training(layout, chunks, None, [None] * len(chunks))
    if headless:  # as a reward model, whose last chunk has a head of its own instead
        for chunk in training.chunks:
            megatron.unwrapped(chunk).post_process = False
    refused = _preflight.refusal(read_call(schedules.forward_step, training.schedule_arguments()))
    return "" if refused is None else refused.told


@pytest.mark.parametrize("headless", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_megatrons_own_placements_are_not_refused(name, headless):
    """Layouts of every form are where Megatron's schedules expect them, with a head of their own or not."""
    assert set(run_on_ranks(_placed, LAYOUTS[name].pp, name, headless)) <= {"", "this release cannot"}


@ranks(2)
def test_chunks_that_lie_in_a_v_are_refused_by_name():
    """Where the first stage's second chunk is the pipeline's last one, the run goes on cold, and says why."""
    training = pipeline(VIRTUAL)
    megatron.unwrapped(training.chunks[1]).post_process = dist.get_rank() == 0
    schedule = warm_first_call(_counts_microbatches)
    counted = call(training, schedule)

    assert counted == VIRTUAL.num_microbatches
    assert training.forward_step.counts == (0, 0)
    assert schedule.warmup.report.reason.startswith(
        "rank 0: chunk 1 has post_process=True, but is not the last one of Megatron's interleaved schedule "
        "[another-placement]; "
    )
