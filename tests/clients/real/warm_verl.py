"""Warm every first pipeline call of verl's Megatron engine; name this module as ``external_lib``."""

from __future__ import annotations

from verl.workers.engine.megatron.transformer_impl import MegatronEngine

from pp_free_warmup import warm_first_call

MegatronEngine.forward_backward_batch = warm_first_call(MegatronEngine.forward_backward_batch)
