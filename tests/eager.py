"""What trainers that count on Transformer Engine need to run on Megatron's own eager modules."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


def local_layers(spec: Any) -> Any:
    """Let a function that returns Transformer Engine's layers return Megatron's own."""

    @functools.wraps(spec)  # mbridge reads its signature
    def local(config: Any, use_transformer_engine: bool, **more: Any) -> Any:
        return spec(config, use_transformer_engine=False, **{**more, "normalization": config.normalization})

    return local


@contextmanager
def eager_attention() -> Iterator[None]:
    """Let Megatron's eager attention take packed samples and masks of two dimensions, as TE's does."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    with mock.patch.object(DotProductAttention, "forward", _attending(DotProductAttention.forward)):
        yield


def _attending(forward: Any) -> Any:
    """Wrap the attention: say which positions a token may not see as a mask of four dimensions."""
    import torch

    def attend(
        self: Any, query: Any, key: Any, value: Any, mask: Any, *more: Any, packed_seq_params: Any = None, **kw: Any
    ) -> Any:
        packed = packed_seq_params is not None
        if packed:
            samples = packed_seq_params.cu_seqlens_q[1:]
            sample = torch.bucketize(torch.arange(query.shape[0]), samples, right=True)
            mask = (sample[:, None] != sample[None, :])[None, None] | _later(query.shape[0])
            query, key, value = (tensor.unsqueeze(1) if tensor.dim() == 3 else tensor for tensor in (query, key, value))
        elif mask is not None and mask.dim() == 2:
            mask = ~mask.bool()[:, None, None, :] | _later(query.shape[0])
        output = forward(self, query, key, value, mask, *more, **kw)
        return output.squeeze(1) if packed else output

    return attend


def _later(length: int) -> Any:
    import torch

    return torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
