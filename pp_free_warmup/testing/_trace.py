"""Prove that a block of code left a model, and everything around it, as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pp_free_warmup._trace import changes, observed


@contextmanager
def assert_leaves_no_trace(model: Any = None, optimizer: Any = None, *, ignoring: Iterable[str] = ()) -> Iterator[None]:
    """Assert that the block changes nothing that later training could see, field by field.

    Compared, to the bit and by object identity: parameters, gradients, ``main_grad``, buffers
    (those that are not saved too), every plain field and hook of every module, the
    data-parallel wrapper's buckets, configs, optimizer state, the random states of Python,
    NumPy, torch, CUDA and Megatron's tracker, private generators, the environment, and the module
    globals and class attributes of all loaded ``megatron`` and ``transformer_engine`` modules, where
    loss trackers live, and of the files that the model's own classes and hooks lead to.

    If the block raises, nothing is compared.

    Args:
        model: A model chunk or a list of them, wrapped or not; None: globals and random states only.
        optimizer: An optimizer whose state is compared too.
        ignoring: More patterns (``fnmatch``) of paths that may change, beside those of `pp_free_warmup._trace.BENIGN`.

    Raises:
        AssertionError: Something changed; the text lists every path, before and after.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> with assert_leaves_no_trace(model):
        ...     model(torch.ones(1, 2))
        tensor(...)
    """
    before = observed(model, optimizer)
    yield
    changed = changes(before.fields, observed(model, optimizer).fields, ignoring)
    if changed:
        raise AssertionError(f"The block left a trace in {len(changed)} places:\n" + "\n".join(changed))
