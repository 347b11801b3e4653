"""Everything that lies in a field or a container, of the model and of the forward step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pp_free_warmup._call import ScheduleCall
from pp_free_warmup._reach import Reached, Walk
from pp_free_warmup._structure import Kept


@contextmanager
def fields(call: ScheduleCall) -> Iterator[None]:
    """Keep which objects lie where, by one rule and not by a list of names.

    Covered are all modules and configs, the plain objects and containers that hang on them, and what the
    forward step and the loss that it returns hold: the objects they are bound to, closures, a partial's
    arguments, globals that they name. What a fetch of the caller's data changes stays changed, for it
    happens once.

    Changed by: forwards, which cache, count, flag, collect and register; backwards; the schedule's own step.
    Put back by: writing each field and entry that differs; what appeared is gone, and is made again when needed.
    Missed by: the next step, from a rotary table that is too short to a route that was replayed already.
    """
    walk = Walk()
    model = walk.from_model([*call.chunks, *call.configs()])
    step = walk.from_step([call.keywords.get("forward_step_func")])
    call.reaches([*model.modules, *step.modules])
    with ExitStack() as undo:

        def keep(reached: Reached) -> None:
            call.random.also(reached.generators)
            kept = Kept(reached)
            undo.callback(kept.put_back)
            call.random.around.append(kept.as_caller)
            undo.callback(call.random.around.remove, kept.as_caller)

        call.random.also(model.generators)
        undo.callback(Kept(model).put_back)
        keep(step)
        call.before_loss.append(lambda loss: keep(walk.from_step([loss])))
        undo.callback(call.before_loss.clear)
        yield
