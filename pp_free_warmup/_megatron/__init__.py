"""The one door to Megatron: no other module of the package imports it.

Each file here knows one side of it, and says for which releases.
"""

from __future__ import annotations

from pp_free_warmup._megatron.contract import check_contract
from pp_free_warmup._megatron.groups import Groups, groups_of, is_initialized, pipeline_group_of
from pp_free_warmup._megatron.random import TrackerContents, read_tracker, set_tracker
from pp_free_warmup._megatron.schedule import (
    INTERLEAVED,
    REQUIRED_KEYWORDS,
    SCHEDULE_NAMES,
    Shape,
    arriving_shape,
    backward_step,
    config_of,
    forward_step,
    is_encoder_decoder,
    is_first,
    is_first_microbatch,
    is_fully_sharded,
    is_last,
    owner_of_input,
    receive_shapes,
    release_output,
    schedule_module,
    unwrapped,
    without_gradient_sync,
)

__all__ = [
    "INTERLEAVED",
    "REQUIRED_KEYWORDS",
    "SCHEDULE_NAMES",
    "Groups",
    "Shape",
    "TrackerContents",
    "arriving_shape",
    "backward_step",
    "check_contract",
    "config_of",
    "forward_step",
    "groups_of",
    "is_encoder_decoder",
    "is_first",
    "is_first_microbatch",
    "is_fully_sharded",
    "is_initialized",
    "is_last",
    "owner_of_input",
    "pipeline_group_of",
    "read_tracker",
    "receive_shapes",
    "release_output",
    "schedule_module",
    "set_tracker",
    "unwrapped",
    "without_gradient_sync",
]
