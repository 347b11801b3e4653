"""Short texts that are equal exactly when the bits are."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import torch


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return dtype, shape and a hash of the values' bytes, so NaN equals NaN and 0.0 differs from -0.0."""
    shape = tuple(tensor.shape)
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(shape)}"
    if tensor.device.type == "meta":
        return f"{text} meta"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return f"{text} freed"
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return f"{text} {bytes_digest(flat.view(torch.uint8).numpy().tobytes())}"


def bytes_digest(data: bytes) -> str:
    """Return 16 hexadecimal digits of *data*'s BLAKE2 hash."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def pickle_digest(value: Any) -> str:
    """Return the digest of a plain value (nested tuples of numbers) by its pickled bytes."""
    return bytes_digest(pickle.dumps(value))
