"""The process of one rank: waits for jobs on its connection and dies with it.

Forked by `_rank_template`; with GPUs, started as ``python -m pp_free_warmup.testing._rank_worker FD``.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from pp_free_warmup.testing._afresh import forget_megatron, let_models_die
from pp_free_warmup.testing._cuda_on_cpu import cuda_on_cpu
from pp_free_warmup.testing._rank_job import Job, Outcome
from pp_free_warmup.testing._shared_gpu import spread

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def main(descriptor: int) -> None:
    """Serve jobs from *descriptor* until the test process closes its end or is gone."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    connection = Connection(descriptor)
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, jobs), daemon=True).start()
    with ExitStack() as prepared:
        if torch.cuda.is_available():
            import_module("pp_free_warmup.testing._chunks")  # imports Megatron and Transformer Engine
        else:
            prepared.enter_context(cuda_on_cpu())
        gc.collect()
        gc.freeze()
        connection.send_bytes(_answer(Outcome("returned", "ready")))
        while True:
            job: Job = pickle.loads(jobs.get())
            run(job, connection)
            del job


def _receive(connection: Connection, jobs: queue.SimpleQueue[bytes]) -> None:
    """Queue what comes in; when the other end is gone, end this process and its children."""
    while True:
        try:
            jobs.put(connection.recv_bytes())
        except (EOFError, OSError):
            os.killpg(os.getpgid(0), signal.SIGKILL)


def _answer(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception:  # noqa: BLE001 - whatever a value's own pickling raises
        return pickle.dumps(Outcome("raised", text="The value returned on this rank cannot be pickled.\n" + _trace()))


def run(job: Job, connection: Connection) -> None:
    """Run *job* inside a process group of its own and tell how it ended."""
    sys.path[:] = job.path
    with ExitStack() as prepared:
        try:
            prepared.enter_context(_device(job))
            prepared.enter_context(_process_group(job))
            outcome = Outcome("returned", _with_our_warnings(job))
        except BaseException as error:  # noqa: BLE001 - the test process raises it again
            skipped = type(error).__name__ == "Skipped"
            outcome = Outcome("skipped", text=str(error)) if skipped else Outcome("raised", text=_trace(job.where.file))
        connection.send_bytes(_answer(outcome))


def _with_our_warnings(job: Job) -> Any:
    """Call the job's function; a warning at or by this package is an error, as in the test process."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.filterwarnings("error", module=r"pp_free_warmup(\.|$)")
        warnings.filterwarnings("error", message="pp_free_warmup: ")
        with _monkeypatches_undone(job):
            return job.where.find()(*job.arguments, **job.keywords)


@contextmanager
def _monkeypatches_undone(job: Job) -> Iterator[None]:
    """Undo what a test patched here: pytest undoes its own fixture, of which this process has a copy."""
    try:
        yield
    finally:
        for given in (*job.arguments, *job.keywords.values()):
            if type(given).__name__ == "MonkeyPatch":
                given.undo()


@contextmanager
def _device(job: Job) -> Iterator[None]:
    """Make the job's device the current one."""
    if job.device == "cpu":
        with cuda_on_cpu(jit=job.jit):
            yield
        return
    torch.cuda.set_device(spread(job.world_size).device(job.rank))
    yield


@contextmanager
def _process_group(job: Job) -> Iterator[None]:
    """Start torch.distributed for the job; afterwards leave nothing of it, nor of Megatron's groups."""
    patience = timedelta(seconds=job.timeout)
    host, port = job.store
    store = dist.PrefixStore(job.prefix, dist.TCPStore(host, port, is_master=False, timeout=patience))
    torch.manual_seed(1234)
    dist.init_process_group(
        BACKENDS[job.device], store=store, rank=job.rank, world_size=job.world_size, timeout=patience
    )
    try:
        yield
    finally:
        # A rank that closed its sockets now would fail another that is still using them.
        store.set(f"done{job.rank}", "")
        store.wait([f"done{rank}" for rank in range(job.world_size)], patience)
        forget_megatron()
        let_models_die()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


def _trace(file: str | None = None) -> str:
    """Format the current exception, with the local variables of the innermost frame in *file*."""
    text = traceback.format_exc()
    frames = [frame for frame, _ in traceback.walk_tb(sys.exc_info()[2]) if frame.f_code.co_filename == file]
    if frames:
        shown = (f"    {name} = {_short(value)}" for name, value in frames[-1].f_locals.items())
        text += "\n".join((f"Local variables of {frames[-1].f_code.co_name}:", *shown))
    return text


def _short(value: object, limit: int = 400) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a repr may raise anything
        text = f"<repr failed: {error!r}>"
    return text if len(text) <= limit else text[:limit] + " ..."


if __name__ == "__main__":
    main(int(sys.argv[1]))
