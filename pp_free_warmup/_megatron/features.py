"""Parts of Megatron that learn from the first forward they see, or carry something from one to the next.

What a release lacks, or a process has not imported, yields nothing. The schedules of every release
import the modules named here themselves, as far as that release has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from pp_free_warmup._megatron.trackers import MOE, Slot, loaded, named

CUDA_GRAPHS = "megatron.core.transformer.cuda_graphs"
OFFLOAD = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
RANDOM = "megatron.core.tensor_parallel.random"
Modules = Iterable[torch.nn.Module]


def router_replays(modules: Modules) -> Iterator[Any]:
    """Yield every object that records or replays a router's choices, each once (0.16 on).

    A trainer may clear Megatron's own list of them while the routers still hold theirs.
    """
    listed = getattr(named(f"{MOE}.router_replay", "RouterReplay"), "global_router_replay_instances", [])
    held = [vars(module).get("router_replay") for module in modules]
    yield from {id(replay): replay for replay in (*listed, *held) if replay is not None}.values()


def router_generators() -> Iterator[Slot]:
    """Yield where a router under forced load balancing keeps its own random state, with a copy to lend.

    A generator seeded at its first use (0.14 and 0.15), a bias per layer drawn once (0.17 on).
    """
    shared = named(f"{MOE}.moe_utils", "RandomSTEShared")
    if shared is not None:
        yield Slot(shared, "_cache", dict(shared._cache))
    forced = named(f"{MOE}.moe_utils", "RandomSTE")
    if forced is not None and "generator" in vars(forced):
        yield Slot(forced, "generator", _same_stream(forced.generator))


def over_budget_flags(modules: Modules) -> Iterator[torch.Tensor]:
    """Yield the flags that say a rank got more tokens than its capacity, and stay up until read (0.18 on)."""
    for dispatcher in [vars(module)["token_dispatcher"] for module in modules if "token_dispatcher" in vars(module)]:
        flag = getattr(getattr(dispatcher, "_comm_manager", None), "over_budget", None)
        if isinstance(flag, torch.Tensor):
            yield flag


def router_tracer() -> Any:
    """Return the tracer that writes routing decisions to a file, or None (0.19)."""
    return named(f"{MOE}.router_trace", "_MOE_ROUTER_TRACER")


def offload_plan() -> Iterator[Slot]:
    """Yield what keeps fine-grained offloading out of the pass: no manager, and one that learns no plan (0.16 on).

    Without a chunk handler every hook of the offloading passes its tensor through.
    """
    manager = named(OFFLOAD, "PipelineOffloadManager")
    if manager is not None:
        yield Slot(manager, "OFFLOAD_MGR", None)
        yield Slot(manager, "init_model_chunk_offload_handler", _no_handler)


def quiet_offload_pool() -> None:
    """Let the manager that the pass has made die without emptying CUDA's cache, as its pool does then (0.16 on)."""
    manager = named(OFFLOAD, "PipelineOffloadManager")
    pool = getattr(getattr(manager, "OFFLOAD_MGR", None), "_cpu_tensor_pool", None)
    if pool is not None:
        vars(pool)["clear"] = _nothing


def _nothing() -> None: ...


def stash_plan() -> Iterator[Slot]:
    """Yield the manager of paged stashing; the one made in its absence is switched off (0.18 on)."""
    manager = named(f"{MOE}.paged_stash", "PagedStashManager")
    if manager is not None:
        yield Slot(manager, "STASH_MGR", None)


def graph_slots(modules: Modules) -> Iterator[Slot]:
    """Yield what makes layers run eager: the local graphs' manager (all releases), Transformer Engine's graphs."""
    manager = named(CUDA_GRAPHS, "CudaGraphManager")
    if manager is not None:
        yield Slot(manager, "__call__", _run_eager)
    for module in modules:
        if isinstance(vars(module).get("cuda_graphs"), list):
            yield Slot(module, "cuda_graphs", [])


def checkpointing_flag() -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yield the flag that says a recomputed forward runs; an exception leaves it up (0.16 on)."""
    random = loaded(RANDOM)
    if hasattr(random, "IS_CHECKPOINTING"):
        yield random, ("IS_CHECKPOINTING",)


def _no_handler(*_arguments: Any, **_named: Any) -> None:
    """Stand in for `init_model_chunk_offload_handler`."""


def _run_eager(manager: Any, module: torch.nn.Module, args: Any, kwargs: Any, **_named: Any) -> Any:
    """Stand in for `CudaGraphManager.__call__`, doing what it does where it finds no graph and no gradient.

    From 0.16 on a manager may wrap a method of the module instead of the module itself.
    """
    function = getattr(manager, "func", None)
    if function is not None:
        return function(*args, **kwargs)
    return super(MegatronModule, module).__call__(*args, **kwargs)


def _same_stream(generator: torch.Generator | None) -> torch.Generator | None:
    if generator is None:
        return None
    copy = torch.Generator(device=generator.device)
    copy.set_state(generator.get_state())
    return copy
