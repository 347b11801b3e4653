"""Fields of Megatron's configs, the hooks that the trainer put there included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._undo import mapping_kept


@contextmanager
def config_fields(call: ScheduleCall) -> Iterator[None]:
    """Keep every field of every config in the model, down to the very same functions.

    Changed by: layers and forward steps that write to ``config``.
    Put back by: the objects that were there; fields that appeared are deleted.
    Missed by: whatever the trainer installed: ``grad_sync_func``, ``no_sync_func``, ``finalize_model_grads_func``.
    """
    found = [*call.configs(), *(vars(module).get("config") for module in call.modules())]
    with ExitStack() as kept:
        for config in {id(config): config for config in found if hasattr(config, "__dict__")}.values():
            kept.enter_context(mapping_kept(vars(config)))
        yield
