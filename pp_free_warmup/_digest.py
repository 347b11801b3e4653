"""Short texts that are equal exactly when the bits are."""

from __future__ import annotations

import array
import enum
import hashlib
import itertools
import pickle
import queue
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return dtype, shape and a hash of the values' bytes, so NaN equals NaN and 0.0 differs from -0.0.

    Nested, sparse and quantized tensors and subclasses that hold other tensors are told by the tensors
    that they are made of. The values are read from a copy: sharing a storage with NumPy, even for a
    moment, would leave it unable to be resized.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # no mode and no subclass takes part
        name = str(tensor.dtype).removeprefix("torch.")
        parts = _parts(tensor)
        if parts is not None:
            return f"{name}({', '.join(tensor_digest(part) for part in parts)})"
        text = f"{name}{list(torch.Tensor.size(tensor))}"  # an uninitialized parameter refuses .shape
        if tensor.device.type == "meta":
            return f"{text} meta"
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            return f"{text} freed"
        return f"{text} {_values_digest(tensor)}"


def _parts(tensor: torch.Tensor) -> Iterable[torch.Tensor] | None:
    """Return the tensors that a tensor is made of; None for one that has values of its own."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in COMPRESSED:
        return (*(getattr(tensor, name)() for name in COMPRESSED[tensor.layout]), tensor.values())
    if tensor.layout is not torch.strided or _holds_none_itself(tensor):
        return [part for _, part in sorted(vars(tensor).items()) if isinstance(part, torch.Tensor)]
    if tensor.is_nested:
        return tensor.unbind()
    return [tensor.int_repr(), *_scales(tensor)] if tensor.is_quantized else None


def _holds_none_itself(tensor: torch.Tensor) -> bool:
    """Tell whether *tensor* only stands for others, or for nothing as a fake one does: reading it ends the process."""
    try:
        storage = tensor.untyped_storage()
        is_fake = isinstance(tensor, FakeTensor)
        return tensor.device.type != "meta" and storage.nbytes() > 0 and (is_fake or not storage.data_ptr())
    except RuntimeError:  # no storage at all, as under torch.func, or one that is marked as not to be read
        return not tensor.is_nested


def _scales(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [torch.tensor([tensor.q_scale(), tensor.q_zero_point()], dtype=torch.float64)]
    return [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]


def _values_digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    copy = flat.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return bytes_digest(copy.view(torch.uint8).numpy())


def bytes_digest(data: Any) -> str:
    """Return 16 hexadecimal digits of the BLAKE2 hash of bytes, or of an array's bytes."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def pickle_digest(value: Any) -> str:
    """Return the digest of a plain value (nested tuples of numbers) by its pickled bytes."""
    return bytes_digest(pickle.dumps(value))


# Read by the builtin's own ``__repr__``: a subclass's would be the caller's code.
NUMBERS_AND_TEXTS = (int, float, complex, str, bytes)
PLAIN = (type(None), *NUMBERS_AND_TEXTS, enum.Enum, torch.dtype, torch.device, range, slice)
LONGEST_TEXT, LONGEST_KEY = 200, 4000
LARGEST_ARRAY = 64 * 2**20


def plain_text(value: Any, longest: int = LONGEST_TEXT) -> str:
    """Return a plain value as text; one of over *longest* characters is cut, with the digest of the whole."""
    kind = type(value)
    own = next((base for base in NUMBERS_AND_TEXTS if kind is not bool and issubclass(kind, base)), None)
    if own is None and issubclass(kind, enum.Enum):
        return f"{kind.__name__}.{vars(value).get('_name_')}"
    text = repr(value) if own is None else own.__repr__(value)
    return shortened(text, longest)


def shortened(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return *text*, or its beginning and the digest of the whole."""
    return text if len(text) <= longest else f"{text[:80]}... {bytes_digest(text.encode(errors='replace'))}"


def state_reader(kind: type) -> Callable[[Any], str] | None:
    """Return what tells the state of an object of *kind* that has no fields of its own, or None.

    Generators by their states, arrays by their bytes (those that are mapped from a file, hold
    objects or are larger than 64 MiB by identity only), counters and queues by where they are.
    """
    return next((read for base, read in (*READERS, *_numpy_readers()) if issubclass(kind, base)), None)


def _python_generator(generator: random.Random) -> str:
    return "" if isinstance(generator, random.SystemRandom) else pickle_digest(random.Random.getstate(generator))


READERS: tuple[tuple[Any, Callable[[Any], str]], ...] = (
    (torch.Generator, lambda generator: bytes_digest(generator.get_state().cpu().numpy())),
    (random.Random, _python_generator),
    (itertools.count, itertools.count.__repr__),
    (queue.SimpleQueue, lambda waiting: f"{queue.SimpleQueue.qsize(waiting)} in"),
    (bytearray, bytes_digest),
    (array.array, lambda values: bytes_digest(array.array.tobytes(values))),
)


def _numpy_readers() -> tuple[tuple[Any, Callable[[Any], str]], ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return ()

    def array_digest(values: Any) -> str:
        small = numpy.ndarray.nbytes.__get__(values) <= LARGEST_ARRAY and not isinstance(values, numpy.memmap)
        readable = small and not numpy.ndarray.dtype.__get__(values).hasobject
        return bytes_digest(numpy.ndarray.tobytes(values)) if readable else ""

    return (
        (numpy.ndarray, array_digest),
        (numpy.generic, lambda number: bytes_digest(numpy.generic.tobytes(number))),
        (numpy.random.Generator, lambda each: pickle_digest(each.bit_generator.state)),
        (numpy.random.BitGenerator, lambda each: pickle_digest(each.state)),
        (numpy.random.RandomState, lambda each: pickle_digest(each.get_state(legacy=False))),
    )
