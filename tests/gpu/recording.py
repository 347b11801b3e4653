"""What is there to be compared on one rank: exact digests, taken step by step."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from pp_free_warmup._digest import tensor_digest
from pp_free_warmup.testing import _recording as recording
from pp_free_warmup.testing.models import Training

# Everything is compared in these steps and in the last one; losses and gradient norms in every one.
CLOSELY = (0, 1, 2, 5, 6)
Fields = dict[str, str]


class Recorder:
    """Writes down a training as ``path -> text``, one mapping per step.

    Args:
        training: What is trained.
        steps: How many steps it will be.
        activations: Whether layers are hooked.
    """

    def __init__(self, training: Training, steps: int, *, activations: bool) -> None:
        self.fields: list[Fields] = []
        self.losses: list[float] = []
        self._training = training
        self._activations = recording.Activations() if activations else None
        self._close, self._last = {*CLOSELY, steps - 1}, steps - 1

    @property
    def closely(self) -> bool:
        """Whether everything is compared in this step."""
        return len(self.fields) - 1 in self._close

    def begin(self) -> AbstractContextManager[None]:
        """Begin a step's mapping; return the context in which its activations are seen."""
        self.fields.append({})
        watched = self._activations is not None and self.closely
        return self._activations.watched(self._training.chunks) if watched else nullcontext()

    def note(self, path: str, value: object) -> None:
        """Write down one value of this step."""
        self.fields[-1][path] = value if isinstance(value, str) else repr(value)

    def returned(self, what: str, losses: list[Any]) -> None:
        """Write down what the schedule returned."""
        self.fields[-1] |= {f"{what}.{path}": text for path, text in recording.loss_fields(losses).items()}
        for entry in losses:
            for value in entry.values() if isinstance(entry, dict) else ():
                self.losses.append(float(value.flatten()[0]))

    def gradients(self) -> None:
        """Write down gradients and activations, before the optimizer works."""
        if self.closely:
            self.fields[-1] |= recording.gradient_fields(self._training.chunks)
        if self._activations is not None:
            self.fields[-1] |= self._activations.taken()

    def state(self) -> None:
        """Write down parameters, buffers, FP8 scales, random states and logs; at both ends the whole state."""
        if not self.closely:
            return
        chunks = self._training.chunks
        self.fields[-1] |= recording.model_fields(chunks) | recording.global_fields() | dict(_fp8_fields(chunks))
        if len(self.fields) - 1 in (0, self._last):
            self.fields[-1] |= self._whole_state()

    def _whole_state(self) -> Fields:
        """Walk over everything reachable; what cannot be walked is told, and costs nothing else."""
        try:
            return recording.whole_fields(self._training.chunks, self._training.optimizer)
        except Exception:  # noqa: BLE001 - a library's object that cannot be read must not cost the numbers
            return {"state walk failed": traceback.format_exc()}


def _fp8_fields(chunks: list[Any]) -> Iterator[tuple[str, str]]:
    """Yield scales and amax histories of Transformer Engine's layers."""
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            meta = vars(module).get("fp8_meta") or {}
            for key in ("scaling_fwd", "scaling_bwd"):
                for kind in ("scale", "amax_history"):
                    value = getattr(meta.get(key), kind, None)
                    if isinstance(value, torch.Tensor):
                        yield f"fp8.chunk{number}.{name}.{key}.{kind}", tensor_digest(value)
