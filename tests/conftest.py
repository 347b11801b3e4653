"""What every test starts from: Megatron is imported, and its own warnings are not ours."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Apex is absent, and what Megatron and torch deprecate of themselves
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel.schedules  # noqa: F401
