"""Channels are opened through Megatron's own transfers, both ways, in an order that cannot wait in a circle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from pp_free_warmup import prime_channels
from pp_free_warmup.errors import NotInitialized, UnsupportedSetup
from pp_free_warmup.testing import ranks

pytestmark = pytest.mark.ranks
MODES = {
    "batched": {"batch_p2p_comm": True},
    "unbatched": {"batch_p2p_comm": False},
    "overlapped": {"batch_p2p_comm": False, "overlap_p2p_comm": True},
}


class Chunk(torch.nn.Module):
    """A model chunk as far as channels are concerned: something with a config."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def chunk(mode: str = "batched", **fields: Any) -> Chunk:
    """Start Megatron's groups, unless that was done, and return a chunk whose stages send in *mode*."""
    from megatron.core import ModelParallelConfig, parallel_state

    stages = fields.pop("stages", dist.get_world_size())
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    own = {"pipeline_dtype": torch.float32, "pipeline_model_parallel_size": stages, **MODES[mode], **fields}
    config = ModelParallelConfig(**own)
    config.hidden_size = 8
    return Chunk(config)


def transfers(group: Any) -> int:
    """Return how many operations this rank has started on *group*; gloo counts sends and receives too."""
    return group._get_backend(torch.device("cpu"))._get_sequence_number_for_group()


def pipeline_group() -> Any:
    """Return Megatron's own pipeline group."""
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_group()


class Recorder:
    """Megatron's communicator, keeping a note of each exchange."""

    def __new__(cls, group: Any, config: Any) -> Any:
        """Make a communicator of a class that can be had only where Megatron is imported."""
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        class Recording(P2PCommunicator):
            def _communicate(self, **asked: Any) -> Any:
                self.exchanges.append(
                    {name for name, value in asked.items() if value is not None and value is not False}
                )
                assert set(asked["tensor_shape"]) == {1}
                return super()._communicate(**asked)

        recording = Recording(group, config)
        recording.exchanges = []
        return recording


def prime_often(mode: str, wraps: bool, shapes: bool, times: int) -> float:
    """Open the channels *times* times and return the slowest time of all but the first, in seconds."""
    chunks = [chunk(mode, variable_seq_lengths=shapes)] * (2 if wraps else 1)
    reports = [prime_channels(chunks) for _ in range(times)]
    assert reports[0].opened == ("forward", "backward")
    assert all(report.opened == () for report in reports[1:])
    return max(report.total for report in reports[1:])


@pytest.mark.parametrize("shapes", [False, True], ids=["fixed", "shapes"])
@pytest.mark.parametrize("wraps", [False, True], ids=["line", "ring"])
@pytest.mark.parametrize("mode", MODES)
@ranks(2)
def test_two_stages_open_their_channels(mode, wraps, shapes) -> None:
    """Every way of sending opens between two stages, as a line and as a ring, with and without shapes."""
    prime_often(mode, wraps, shapes, 5)


@pytest.mark.parametrize("shapes", [False, True], ids=["fixed", "shapes"])
@pytest.mark.parametrize("wraps", [False, True], ids=["line", "ring"])
@pytest.mark.parametrize("mode", MODES)
@ranks(3)
def test_an_odd_ring_opens_its_channels(mode, wraps, shapes) -> None:
    """With three stages two even ranks are neighbours across the wrap, and still nobody waits in a circle."""
    prime_often(mode, wraps, shapes, 5)


@pytest.mark.parametrize("wraps", [False, True], ids=["line", "ring"])
@pytest.mark.parametrize("mode", MODES)
@ranks(4)
def test_four_stages_open_their_channels(mode, wraps) -> None:
    """Four stages open their channels in every way of sending."""
    prime_often(mode, wraps, False, 5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("wraps", [False, True], ids=["line", "ring"])
@pytest.mark.parametrize("mode", MODES)
def test_opening_two_hundred_times_never_stalls(stages, mode, wraps):
    """Two hundred repetitions in each way of sending end, the median pair within 100 ms."""
    from pp_free_warmup.testing import run_on_ranks

    medians = run_on_ranks(medians_of, stages, mode, wraps, 200, timeout=900.0)
    assert max(medians) / stages <= 0.1


def medians_of(mode: str, wraps: bool, times: int) -> float:
    """Open the channels *times* times and return the median time in seconds."""
    chunks = [chunk(mode)] * (2 if wraps else 1)
    totals = sorted(prime_channels(chunks).total for _ in range(times))
    return totals[times // 2]


@pytest.mark.parametrize("stages", [2, 3])
def test_each_direction_is_an_exchange_of_its_own(stages):
    """One exchange goes forwards, one backwards, never both in one; the ends of a line have one neighbour."""
    from pp_free_warmup.testing import run_on_ranks

    line = run_on_ranks(recorded, stages, False)
    ring = run_on_ranks(recorded, stages, True)

    shape = {"tensor_shape"}
    forward, backward = shape | {"tensor_send_next", "recv_prev"}, shape | {"tensor_send_prev", "recv_next"}
    assert ring == [[forward, backward]] * stages
    assert line[0] == [forward - {"recv_prev"}, backward - {"tensor_send_prev"}]
    assert line[-1] == [forward - {"tensor_send_next"}, backward - {"recv_next"}]


def recorded(wraps: bool) -> list[set[str]]:
    """Open channels through a communicator of the caller's and return its exchanges."""
    chunks = [chunk()] * (2 if wraps else 1)
    communicator = Recorder(pipeline_group(), chunks[0].config)
    prime_channels(chunks, p2p_communicator=communicator)
    return communicator.exchanges


@ranks(2)
def test_the_callers_communicator_is_used() -> None:
    """A communicator on a group of the caller's own leaves Megatron's group alone."""
    own, mine = chunk(), dist.new_group([0, 1])
    before, before_mine = transfers(pipeline_group()), transfers(mine)
    prime_channels(own, p2p_communicator=Recorder(mine, own.config))

    assert transfers(pipeline_group()) == before
    assert transfers(mine) > before_mine


@pytest.mark.parametrize(
    ("mode", "wraps", "used"), [("unbatched", False, True), ("overlapped", True, True), ("batched", True, False)]
)
@ranks(2)
def test_two_unbatched_stages_open_the_worlds_channels_too(mode, wraps, used) -> None:
    """With two stages Megatron sends one of two transfers through WORLD, unless it batches them."""
    chunks = [chunk(mode)] * (2 if wraps else 1)
    before = transfers(dist.group.WORLD), transfers(pipeline_group())
    prime_channels(chunks)

    assert (transfers(dist.group.WORLD) > before[0]) is used
    assert transfers(pipeline_group()) > before[1]


@ranks(3)
def test_three_stages_leave_the_world_alone() -> None:
    """With more than two stages all transfers go through the pipeline's group."""
    chunks = [chunk("overlapped")] * 2
    before = transfers(dist.group.WORLD)
    prime_channels(chunks)

    assert transfers(dist.group.WORLD) == before


@ranks(2)
def test_shapes_are_exchanged_where_the_schedule_exchanges_them() -> None:
    """With variable sequence lengths each direction takes one transfer more, for the shape."""
    from megatron.core import __version__

    def count(shapes: bool) -> int:
        own = chunk(variable_seq_lengths=shapes)
        before = transfers(pipeline_group()) + transfers(dist.group.WORLD)
        prime_channels(own)
        return transfers(pipeline_group()) + transfers(dist.group.WORLD) - before

    assert count(True) == 2 * count(False), __version__


@ranks(2)
def test_one_stage_has_no_channels() -> None:
    """Without neighbours nothing is sent."""
    report = prime_channels(chunk(stages=1))

    assert report.seconds == {}


@ranks(2)
def test_rebuilt_groups_are_new() -> None:
    """After groups were destroyed and made again their channels count as new."""
    from megatron.core import parallel_state

    own = chunk()
    assert prime_channels(own).opened == ("forward", "backward")
    assert prime_channels(own).opened == ()
    old = pipeline_group()
    parallel_state.destroy_model_parallel()
    chunk()

    assert pipeline_group() is not old
    assert prime_channels(own).opened == ("forward", "backward")


@ranks(2)
def test_a_wrapper_with_another_group_inside_is_new() -> None:
    """A wrapper that rebuilt its group stays the same object, and its channels count as new."""

    class Rebuilding(dist.ProcessGroup):
        def __init__(self, group):
            super().__init__(group.rank(), group.size())
            self.group = group

    own = chunk()
    communicator = Recorder(pipeline_group(), own.config)
    outer = Rebuilding(pipeline_group())
    from pp_free_warmup import _megatron as megatron

    assert megatron.inner_group(outer) is pipeline_group()
    assert prime_channels(own, p2p_communicator=communicator).opened == ("forward", "backward")
    outer.group = dist.new_group([0, 1])
    communicator.pp_group = outer.group
    assert prime_channels(own, p2p_communicator=communicator).opened == ("forward", "backward")


@ranks(4)
def test_all_channels_cover_the_groups_that_reduce() -> None:
    """With everything asked for, data, embedding and norm groups are opened, in one order on all ranks."""
    own = chunk(stages=2)
    groups = dict(dist.distributed_c10d._world.pg_map)
    report = prime_channels(own, channels="all")

    assert list(report.seconds) == ["forward", "backward", "dp_cp", "embd", "mp"]
    assert dict(dist.distributed_c10d._world.pg_map) == groups


@ranks(3)
def test_a_rank_outside_a_group_takes_no_part() -> None:
    """The middle stage of three is no member of the embedding group; groups of one rank are skipped."""
    report = prime_channels(chunk(), channels="all")

    expected = ["forward", "backward", "embd", "mp"] if dist.get_rank() != 1 else ["forward", "backward", "mp"]
    assert list(report.seconds) == expected


@ranks(4)
def test_expert_and_optimizer_groups_are_opened_where_they_are_used() -> None:
    """Experts and a distributed optimizer bring their own groups, each opened once."""
    from megatron.core.distributed import DistributedDataParallelConfig

    own = chunk(stages=2)
    own.config.num_moe_experts = 2
    own.config.calculate_per_token_loss = True
    own.ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    opened = list(prime_channels(own, channels="all").seconds)

    assert {"dp_cp", "expt_dp", "tp_dp_cp", "pp", "tp_ep_pp"} <= set(opened)
    assert len(opened) == len(set(opened))
    told = [None] * 4
    dist.all_gather_object(told, opened)
    assert all(one == opened for one in told)


@pytest.mark.parametrize(
    ("model", "channels", "words"),
    [
        (None, "pipeline", "The model to warm is no model"),
        ([], "pipeline", "The model to warm is no model"),
        (torch.nn.Linear(1, 1), "everything", "channels='everything'"),
    ],
)
def test_what_cannot_be_opened_is_refused_by_name(model, channels, words):
    """A model that is none, and channels that nobody knows, are named before anything is sent."""
    with pytest.raises(UnsupportedSetup, match=words):
        prime_channels(model, channels=channels)


def test_opening_channels_before_there_are_groups_says_so():
    """Without process groups the error names what to do first."""
    with pytest.raises(NotInitialized, match="initialize_model_parallel"):
        prime_channels(torch.nn.Linear(1, 1))
