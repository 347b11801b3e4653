"""Look at everything a warmup could have touched, before and after, and name what changed.

The guards put back what this library knows of. This looks without knowing: at every
field of every module, at class attributes and globals of the files that define the
modules, at what the forward step's function closes over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pp_free_warmup import _transformer_engine as te
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._fingerprint import Fingerprints
from pp_free_warmup._report import Stopwatch
from pp_free_warmup.errors import TraceFound

Picture = dict[str, str]
SHOWN = 40
LIBRARIES = ("torch.", "builtins", "pp_free_warmup.", "transformer_engine.", "torch_")
REGISTRIES = ("_parameters", "_buffers", "_modules")

# Caches of what is a pure function of the weights or the shape: filled once, by whoever runs first.
BENIGN = frozenset(
    {
        "_attention_backends",  # Transformer Engine: which attention kernel was chosen
        "_cu_seqlens_cache",  # Transformer Engine: offsets of equally long sequences
        "_fp8_workspaces",  # Transformer Engine: quantized weights, made anew at the first microbatch
        "_sequence_parallel_attr_cache",  # megatron.core.transformer.utils
        "input_jitter",  # MoE router: a sampler object, made at first use
        "rotary_pos_emb_cache",  # GPTModel: rotary embeddings per length
        "__warningregistry__",  # Python: which warnings were shown
        "__annotations__",
    }
)


@contextmanager
def verified(call: ScheduleCall, optimizer: Any, stopwatch: Stopwatch) -> Iterator[None]:
    """Compare the whole reachable state after the block with that before it.

    Costs a copy of every tensor to the host, twice: for a test run, not for every day. Where fetching
    the first batch drew random numbers, as it would have without a warmup, those may differ.

    Args:
        call: The call whose model, config, forward step and random state are looked at.
        optimizer: Its state is looked at as well; None for none.
        stopwatch: Receives the seconds, as phase ``verify``.

    Raises:
        TraceFound: Something differs; its text names every path, up to forty of them.
    """
    with stopwatch.measure("verify"):
        before = picture(call, optimizer)
    yield
    with stopwatch.measure("verify"):
        changed = differences(before, picture(call, optimizer))
    if call.random.drew:
        changed = [path for path in changed if not path.startswith("random")]
    if changed:
        raise _trace_found(changed)


def differences(before: Picture, after: Picture) -> list[str]:
    """Return the paths that differ, with what was there and what is there now."""
    paths = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    return [f"{path}: {before.get(path, 'absent')} -> {after.get(path, 'absent')}" for path in paths]


def picture(call: ScheduleCall, optimizer: Any) -> Picture:
    """Take the fingerprint of everything that a call can reach, by path; benign caches left out."""
    taken: Picture = {}
    for path, text in _everything(call, optimizer):
        if not any(name in BENIGN for name in path.replace("[", ".").replace("'", "").replace("]", "").split(".")):
            taken[path] = text
    return taken


def _everything(call: ScheduleCall, optimizer: Any) -> Iterator[tuple[str, str]]:
    taken = Fingerprints()
    yield from taken.of(call.random.digests(), "random")
    for index, chunk in enumerate(call.chunks):
        for name, module in chunk.named_modules():
            yield from _module(taken, module, f"chunk {index}{'.' if name else ''}{name}")
    if optimizer is not None:
        yield from taken.of(optimizer, "optimizer")
    step = call.keywords["forward_step_func"]
    for name, cell in zip(_free_names(step), getattr(step, "__closure__", None) or (), strict=False):
        yield from taken.of(cell.cell_contents, f"forward_step_func closure {name}")
    for manager, names in te.fp8_manager_fields():
        for name in names:
            yield from taken.of(vars(manager)[name], f"{manager.__name__}.{name}")
    for home in sorted({type(module).__module__ for module in call.modules()} | {_home(step)} & set(sys.modules)):
        if not f"{home}.".startswith(LIBRARIES):
            yield from _file(taken, home)


def _module(taken: Fingerprints, module: Any, path: str) -> Iterator[tuple[str, str]]:
    for name, parameter in module._parameters.items():
        yield from taken.of(parameter, f"{path}.{name}")
        for field, value in vars(parameter).items() if parameter is not None else ():
            yield from taken.of(value, f"{path}.{name}.{field}")
        yield from taken.of(getattr(parameter, "grad", None), f"{path}.{name}.grad")
    for name, buffer in module._buffers.items():
        yield from taken.of(buffer, f"{path}.{name}")
    for name, value in vars(module).items():
        if name not in REGISTRIES:
            yield from taken.of(value, f"{path}.{name}")


def _file(taken: Fingerprints, home: str) -> Iterator[tuple[str, str]]:
    """Yield the globals of one source file, and the class attributes of the classes defined there."""
    for name, value in list(vars(sys.modules[home]).items()):
        if isinstance(value, type) and value.__module__ == home:
            for attribute, held in list(vars(value).items()):
                if not attribute.startswith("__"):
                    yield from taken.of(held, f"{home}.{name}.{attribute}")
        elif not name.startswith("__"):
            yield from taken.of(value, f"{home}.{name}")


def _home(step: Any) -> str:
    return str(getattr(step, "__module__", ""))


def _free_names(step: Any) -> tuple[str, ...]:
    return getattr(getattr(step, "__code__", None), "co_freevars", ())


def _trace_found(changed: list[str]) -> TraceFound:
    more = f"\n  and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    listed = "\n  ".join(changed[:SHOWN])
    return TraceFound(
        f"The warmup left a trace in {len(changed)} place(s).",
        found=f"\n  {listed}{more}\n  expected every field as it was before the pass.",
        matters="A run with the warmup may not be the run without it.",
        do="Guard that state with extra_guards=[...] (see pp_free_warmup.guards), or report it if it is Megatron's.",
    )
