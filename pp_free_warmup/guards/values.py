"""The values of buffers, and a watch over everything that a forward should only read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_free_warmup import _values as tensors
from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import tensors_kept


@contextmanager
def values(call: ScheduleCall) -> Iterator[None]:
    """Keep the values of buffers; stop the run if the pass wrote to what is too large to copy, or to a parameter.

    Buffers of up to 16 MiB are copied, the smallest first, up to 256 MiB together. The others and the
    parameters are watched through their version counters, which cost nothing and see every write
    but those through ``.data``. `keep_parameters` copies what is meant to be written.

    Changed by: forwards that count tokens or keep statistics; routers that re-assign a bias as float32.
    Put back by: copying the values back into the same storage.
    Missed by: the expert bias, which the counted tokens move at the end of the step.
    """
    copied, watched = tensors.copied_and_watched(call)
    with tensors_kept(copied):
        versions = tensors.versions_of(watched)
        yield
    tensors.refuse_written(call, versions)
