"""slime's and miles' routing replay: log-probs write down each token's experts, training uses them again.

Written after slime ``624b824a`` and miles ``31f1ca96``, ``utils/routing_replay.py``: a plain object hangs on
every router, the forward step says in the environment what it is there for, and nothing but the forwards
themselves moves it on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

STAGE = "ROUTING_REPLAY_STAGE"


class Replay:
    """The experts that one router chose, and how far they were used again.

    Attributes:
        top_indices_list: One entry per recorded microbatch.
        forward_index: How many of them forwards have used.
        backward_index: How many of them recomputed forwards have used.
    """

    def __init__(self) -> None:
        self.top_indices_list: list[torch.Tensor] = []
        self.forward_index = 0
        self.backward_index = 0

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, compute: Callable[..., Any]
    ) -> Any:
        """Choose a token's experts: Megatron's router asks what hangs on it."""
        stage = os.environ.get(STAGE, "fallthrough")
        if stage in ("fallthrough", "record"):
            values, indices = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
            if stage == "record":
                self.top_indices_list.append(indices)
            return values, indices
        index = f"{stage.removeprefix('replay_')}_index"
        indices = self.top_indices_list[getattr(self, index)]
        setattr(self, index, getattr(self, index) + 1)
        assert indices.shape == (scores.shape[0], topk)
        return scores.gather(1, indices), indices

    @property
    def consumed(self) -> bool:
        """True when all was used exactly once, in both directions."""
        return self.forward_index == self.backward_index == len(self.top_indices_list)

    def clear(self) -> None:
        """Forget everything, as is done before the next rollout."""
        self.__init__()  # type: ignore[misc]


class Bridge:
    """What Megatron's router asks: the replay of the router whose forward began last."""

    def get_replay_topk(self, *arguments: Any) -> Any:
        """Pass the question on."""
        return _current[0].get_replay_topk(*arguments)


_current: list[Replay] = []


def _make_current(module: Any, arguments: Any) -> None:
    _current[:] = [module.routing_replay]


def hang_on_routers(chunks: list[Any]) -> list[Replay]:
    """Give every router of *chunks* its replay."""
    from megatron.core.transformer.moe.router import TopKRouter

    replays = []
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.routing_replay, module.router_replay = Replay(), Bridge()  # type: ignore[assignment]
                module.register_forward_pre_hook(_make_current)
                replays.append(module.routing_replay)
    return replays


@contextmanager
def staged(stage: str) -> Iterator[None]:
    """Say what the routers are there for, for the length of the block."""
    before = os.environ.get(STAGE, "fallthrough")
    os.environ[STAGE] = stage
    try:
        yield
    finally:
        os.environ[STAGE] = before
