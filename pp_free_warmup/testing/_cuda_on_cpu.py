"""Run real, unchanged megatron-core on a machine without a GPU.

Megatron names the CUDA device in a hundred places. `cuda_on_cpu` lets those
places mean the CPU, for the length of a block, and then puts the very same
objects back. Nothing of Megatron's own logic is replaced: its schedules,
communicator, data parallelism, optimizer and random number tracker run as they
are, over gloo.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch

from pp_free_warmup._undo import swapped
from pp_free_warmup.testing import _cuda_random as cuda_random
from pp_free_warmup.testing import _cuda_streams as cuda_streams

CPU = torch.device("cpu")


@contextmanager
def cuda_on_cpu(*, jit: bool = False) -> Iterator[None]:
    """Let "cuda" mean the CPU for the block, so that megatron-core runs without a GPU.

    Inside, ``torch.cuda`` has one device; its tensors are CPU tensors, its streams are empty and
    its random numbers come from a generator of their own: eager dropout and
    ``torch.nn.init.normal_`` move that generator (and Megatron's tracker, which saves and sets
    it), never the CPU's. An installed Transformer Engine is hidden. May be nested: the inner
    block shares the outer one's "device".

    Not covered: sequence parallelism (the torch LayerNorm of the local spec forbids it), and
    ``deallocate_pipeline_outputs`` with virtual stages on megatron-core 0.16, where gloo's send
    may read the tensor after it was dropped. ``torch.cuda.is_available()`` stays False.

    Args:
        jit: False: whatever Megatron compiles with its ``jit_fuser`` (``torch.compile``) runs
            eagerly. True: Inductor compiles it for real; compiled dropout draws from the CPU's
            generator, since Inductor takes no other.

    Example:
        >>> with cuda_on_cpu():
        ...     torch.zeros(2, device="cuda").device
        device(type='cpu')
    """
    with ExitStack() as undo:
        if not isinstance(torch.cuda.default_generators, cuda_random.OneGenerator):
            undo.enter_context(_transformer_engine_hidden())
            megatron = _megatron_modules()
            torch.compile(_at_once)  # fills torch.compile's table of torch's functions with the real ones
            _lend_torch(partial(_lend, undo))
            _lend_megatron(partial(_lend, undo), megatron)
        # A stance, not Megatron's disable_jit_fuser(): that one acts only on modules that are
        # not imported yet, and could not be undone.
        undo.enter_context(torch.compiler.set_stance("default" if jit else "force_eager"))
        yield


@contextmanager
def pretrain_on_cpu(*, jit: bool = False) -> Iterator[None]:
    """Like `cuda_on_cpu`, and let Megatron-LM's own ``pretrain()`` start without a GPU.

    ``initialize_megatron`` insists on CUDA unless told not to, which ``pretrain()`` never does,
    and on running ``make`` for a helper that the wheel ships built and without its Makefile.
    """
    with cuda_on_cpu(jit=jit), ExitStack() as undo:
        training = _imported("megatron.training.training")
        datasets = _imported("megatron.core.datasets.utils")
        initialize = partial(training.initialize_megatron, allow_no_cuda=True)
        undo.enter_context(swapped(training, "initialize_megatron", initialize))
        undo.enter_context(swapped(datasets, "compile_helpers", _always(None)))
        yield


Lend = Callable[[Any, str, Any], None]


def _lend(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.enter_context(swapped(owner, name, value))


def _lend_torch(lend: Lend) -> None:
    """Lend torch everything it takes for one "device"."""
    cuda = cuda_random.CudaGenerator()
    lend(torch.cuda, "default_generators", cuda_random.OneGenerator((cuda,)))
    for owner in (torch.cuda, torch.cuda.random):
        lend(owner, "_lazy_init", _always(None))
        lend(owner, "_lazy_call", _at_once)
        lend(owner, "is_initialized", _always(True))
        lend(owner, "device_count", _always(1))
        lend(owner, "current_device", _always(CPU))
    for owner in (torch.cuda, torch.cuda.graphs):
        lend(owner, "is_current_stream_capturing", _always(False))
    lend(torch.cuda, "set_device", _always(None))
    lend(torch.cuda, "synchronize", _always(None))
    lend(torch.cuda, "get_device_properties", _no_properties)
    for name in ("Event", "Stream", "stream", "current_stream", "set_stream"):
        lend(torch.cuda, name, getattr(cuda_streams, name))
    lend(torch.cuda, "default_stream", cuda_streams.current_stream)
    lend(torch.Tensor, "record_stream", _always(None))
    for name in ("range_push", "range_pop"):
        lend(torch.cuda.nvtx, name, _always(None))
    _lend_tensors(lend, cuda)


def _lend_tensors(lend: Lend, cuda: cuda_random.CudaGenerator) -> None:
    """Lend torch the functions that make, move and fill tensors on the "device"."""
    for name in cuda_random.FACTORIES:
        lend(torch, name, cuda_random.on_cpu(getattr(torch, name)))
    for name in cuda_random.RANDOM_FACTORIES:
        lend(torch, name, cuda_random.drawn_on_cuda(getattr(torch, name), cuda))
    functional, init = torch.nn.functional, torch.nn.init
    lend(functional, "dropout", cuda_random.dropout_on_cuda(functional.dropout, cuda))
    lend(init, "normal_", cuda_random.normal_on_cuda(init.normal_, cuda))
    lend(torch.Tensor, "cuda", lambda tensor, *_arguments, **_keywords: tensor)
    lend(torch.Tensor, "type", _typed_as_cuda(torch.Tensor.type))


def _lend_megatron(lend: Lend, megatron: dict[str, ModuleType]) -> None:
    """Lend megatron-core (0.14 to 0.19) what only a GPU gives it."""
    # Its setter of the device's random state queues the set until CUDA starts, silently.
    lend(megatron["random"], "_lazy_init", _always(None))
    lend(megatron["random"], "_lazy_call", _at_once)
    # Read without a guard, unset without Transformer Engine (0.16).
    lend(megatron["moe_utils"], "te_general_gemm", None)
    if "maybe_move_tensor_to_cpu" in vars(megatron["dispatcher"]):
        lend(megatron["dispatcher"], "maybe_move_tensor_to_cpu", _moved)


def _megatron_modules() -> dict[str, ModuleType]:
    """Import what is lent to, before torch is touched: nothing then keeps a stand-in for good."""
    names = {
        "random": "megatron.core.tensor_parallel.random",
        "moe_utils": "megatron.core.transformer.moe.moe_utils",
        "dispatcher": "megatron.core.transformer.moe.token_dispatcher",
        "model": "megatron.core.models.gpt.gpt_layer_specs",
        "schedules": "megatron.core.pipeline_parallel.schedules",
        "optimizer": "megatron.core.optimizer",
    }
    return {key: _imported(name) for key, name in names.items()}


def _imported(name: str) -> ModuleType:
    """Import *name* without its warnings: that Apex is absent is not the reader's concern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@contextmanager
def _transformer_engine_hidden() -> Iterator[None]:
    """Make ``import transformer_engine`` fail as if it were not installed.

    Even Megatron's local spec takes its normalisation from it where it can be imported, and it
    cannot run on a CPU.
    """
    name = "transformer_engine"
    kept = {key: sys.modules[key] for key in sys.modules if key == name or key.startswith(name + ".")}
    sys.modules.update(dict.fromkeys((name, *kept)))  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.modules.pop(name, None)
        sys.modules.update(kept)


def _no_properties(*_arguments: Any, **_keywords: Any) -> None:
    """Answer as torch does without a GPU: Inductor asks for its cache key, and copes with this answer only."""
    raise RuntimeError("cuda_on_cpu: there is no GPU to describe")


def _at_once(act: Callable[[], None], **_keywords: Any) -> None:
    """Run what torch would queue until CUDA starts."""
    act()


def _always(value: Any) -> Callable[..., Any]:
    """Return a new function that returns *value*, whatever it is called with.

    A new one each time: torch.compile keeps a table of torch's functions and takes no object twice.
    """
    return lambda *_arguments, **_keywords: value


def _typed_as_cuda(type_: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.type``: Megatron's optimizer compares its text with ``torch.cuda.*``."""

    def typed(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        answer = type_(tensor, *arguments, **keywords)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return typed


def _moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Stand in for MoE's move of split sizes to the host: they are there already."""
    del record_stream
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
