"""What each stage took and put out in the pass, and what follows for the stage after it: no communication here.

Where lengths vary, a made-up activation is a guess from the batch. Once all stages have run, what the
stage before really put out says whether the guess was right.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Parcel(NamedTuple):
    """One tensor on the wire: its shape, and its dtype as torch prints it."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Parcel:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), str(tensor.dtype))


Load = tuple[Parcel, ...]


class Passage(NamedTuple):
    """One chunk's forward in the pass.

    Attributes:
        took: What it was given; empty for the pipeline's first chunk.
        gave: What its forward step put out; None where it failed before.
        parts: How many hidden states lie one after the other in what it takes (multi-token prediction).
    """

    took: Load
    gave: Load | None
    parts: int = 1


def text_of(passages: Sequence[Passage | None]) -> str:
    """Write one rank's passages, chunk after chunk, as JSON; None for a chunk that was not reached."""
    return json.dumps(passages)


def read(text: str) -> list[Passage | None]:
    """Read what `text_of` wrote.

    Example:
        >>> given = [Passage((Parcel((8, 1, 4), "torch.float32"),), None), None]
        >>> read(text_of(given)) == given
        True
    """
    return [None if said is None else Passage(_load(said[0]), _load(said[1]), said[2]) for said in json.loads(text)]


def _load(said: Any) -> Any:
    return None if said is None else tuple(Parcel(tuple(shape), dtype) for shape, dtype in said)


def told(notes: Sequence[Sequence[Passage | None]]) -> list[list[Load | None]]:
    """Work out what every chunk of one pipeline is sent by the one before it.

    A stage that had what it is sent, and ran, shows what it sends on. Of any other it is only known
    what arrived there, and a wire usually carries the same everywhere: that is taken for what it
    sends, as many times along the sequence as the next chunk takes hidden states.

    Args:
        notes: The passages of each rank, in pipeline order.

    Returns:
        For each rank and chunk what it is sent; None for the first, and where nobody knows.
    """
    sent: Load | None = None
    parts: int | None = None  # None: what is sent was seen, not inferred
    found: list[list[Load | None]] = [[None] * len(rank) for rank in notes]
    for chunk in range(len(notes[0])):
        for rank, passages in enumerate(notes):
            passage, first = passages[chunk], rank == chunk == 0
            if not first and sent is not None:
                sent = _repeated(sent, parts, None if passage is None else passage.parts)
                found[rank][chunk] = sent
            if passage is None:
                continue
            parts = passage.parts
            if passage.gave is not None and (first or passage.took == sent):
                sent, parts = passage.gave, None
    return found


def _repeated(load: Load, before: int | None, now: int | None) -> Load:
    """Lengthen what arrived at another stage with *before* hidden states to *now*, where both are known."""
    if before is None or now is None:
        return load
    return tuple(Parcel((shape[0] // before * now, *shape[1:]), dtype) for shape, dtype in load)


def is_wrong(passage: Passage | None, sent: Load | None) -> bool:
    """Tell whether a chunk took something else than it is sent, as far as both are known."""
    return passage is not None and sent is not None and passage.took != sent
