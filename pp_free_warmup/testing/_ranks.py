"""Run the body of a test on several ranks, and let it read like a plain test."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from pp_free_warmup.testing._rank_job import BODY
from pp_free_warmup.testing._rank_pool import RanksFailed, RanksSkipped, run_on_ranks

F = TypeVar("F", bound=Callable[..., Any])


def ranks(
    n: int, *, fresh: bool = False, timeout: float = 120.0, device: str = "cpu", jit: bool = False
) -> Callable[[F], F]:
    """Run a pytest test's body on *n* processes that form one ``torch.distributed`` world.

    The body is ordinary: it asks ``torch.distributed`` for its rank, starts Megatron's groups
    if it needs them, and asserts. Parametrised arguments and fixtures are passed on, as long as
    they can be pickled. The processes are kept for the next test and have Megatron imported;
    after a failure they are replaced.

    Args:
        n: How many ranks.
        fresh: Use new processes with empty compile caches, and end them afterwards.
        timeout: Seconds after which the ranks count as hung: all are killed, and the failure
            shows the stacks of those that were still running.
        device: ``"cpu"`` for gloo inside `cuda_on_cpu`, ``"cuda"`` for NCCL, a GPU per rank; where ranks
            exceed GPUs, they share them (then slower, and otherwise the same).
        jit: Compile Megatron's fused functions for real, see `cuda_on_cpu`.

    Returns:
        The decorator.

    Example:
        >>> @ranks(2)
        ... def test_everyone_knows_the_sum() -> None:
        ...     total = torch.ones(1)
        ...     torch.distributed.all_reduce(total)
        ...     assert total == 2
    """
    how = {"fresh": fresh, "timeout": timeout, "device": device, "jit": jit}
    return functools.partial(_on_ranks, n, how)


def _on_ranks(n: int, how: dict[str, Any], body: F) -> F:
    @functools.wraps(body)
    def test(*arguments: Any, **keywords: Any) -> None:
        __tracebackhide__ = True
        import pytest

        try:
            run_on_ranks(body, n, *arguments, **how, **keywords)
        except RanksFailed as failure:
            reason = str(failure)
        except RanksSkipped as skipped:
            pytest.skip(str(skipped))
        else:
            return
        pytest.fail(reason, pytrace=False)

    setattr(test, BODY, body)
    return cast(F, test)
