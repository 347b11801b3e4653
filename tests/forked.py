"""Ranks that may die: forked from a process that has imported Megatron, watched, and told how each ended.

`pp_free_warmup.testing.ranks` keeps its processes and takes a dead one for a failed test. Here a rank may
be killed, hang or fail, and the test asks how all the others ended. A trial costs a fork, not an import.

The process that forks is `_serve`: it takes trials from its standard input until that closes. There is one
for each set of imports that trials ask for.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import pkgutil
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LOOPBACK = "127.0.0.1"


class Trial(NamedTuple):
    """One function to run on some ranks; *module* is imported by name, from *path*."""

    module: str
    function: str
    arguments: tuple
    ranks: int
    store: str
    group_timeout: float
    deadline: float
    path: tuple[str, ...]


@dataclass(frozen=True)
class Ending:
    """How one rank ended: ``returned``, ``raised``, ``killed`` or ``hung``.

    Attributes:
        kind: One of the four.
        value: What the function returned; for ``raised`` the error's type name.
        text: The traceback, or the stacks of a rank that hung.
        seconds: Since the trial began.
        printed: What the rank printed and logged.
    """

    kind: str
    value: Any = None
    text: str = ""
    seconds: float = 0.0
    printed: str = field(default="", repr=False)


def run_forked(
    function: Any,
    ranks: int,
    *arguments: Any,
    store: str = "agent",
    group_timeout: float = 60.0,
    deadline: float = 60.0,
    after: Any = None,
) -> list[Ending]:
    """Run *function* on forked ranks that form one gloo world.

    Args:
        function: A function of an importable module; it runs inside `cuda_on_cpu`.
        ranks: How many ranks.
        *arguments: What to call it with, picklable.
        store: Who serves the store: ``agent`` (a process of its own, as with torchrun), ``rank0``
            (``tcp://``) or ``file`` (``file://``).
        group_timeout: Seconds that a gloo operation may take.
        deadline: Seconds after which a rank counts as hung and is killed.
        after: A function of an importable module to call once, before the first fork: it imports what is dear.

    Returns:
        One `Ending` per rank.
    """
    server = _server(after)
    path = tuple(sys.path)
    module = function.__module__ if function.__module__ != "__main__" else Path(function.__code__.co_filename).stem
    trial = Trial(module, function.__qualname__, arguments, ranks, store, group_timeout, deadline, path)
    _put(server.stdin, trial)
    return _get(server.stdout)


_servers: dict[str, subprocess.Popen[bytes]] = {}


@contextmanager
def groups_that_wait(seconds: float) -> Iterator[None]:
    """Give the process groups made in the block a timeout of *seconds* (Megatron gives its own 30 minutes)."""
    import torch.distributed as dist

    from pp_free_warmup._undo import swapped

    own = dist.new_group

    def new_group(*arguments: Any, **keywords: Any) -> Any:
        return own(*arguments, **{**keywords, "timeout": timedelta(seconds=seconds)})

    with swapped(dist, "new_group", new_group):
        yield


def _server(after: Any) -> subprocess.Popen[bytes]:
    """Return the process that forks after it has called *after*; start it where this is the first trial of its kind."""
    name = "" if after is None else f"{after.__module__}:{after.__qualname__}"
    if not _servers:
        atexit.register(_stop)
    if name not in _servers:
        _servers[name] = _start(name)
    return _servers[name]


def _start(after: str) -> subprocess.Popen[bytes]:
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    environment["RES_OPTIONS"] = "timeout:1 attempts:1"  # torch looks up the name of whom it connects to
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    command = [sys.executable, "-W", "ignore", "-c", f"import {__name__}; {__name__}._serve({after!r})"]
    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _stop() -> None:
    for server in _servers.values():
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _put(stream: Any, value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _get(stream: Any) -> Any:
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<Q", header)[0]))


def _serve(after: str) -> None:
    """Import what all trials need, once, without starting a thread; then fork for each trial."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import torch

    from pp_free_warmup.testing import cuda_on_cpu

    torch.set_num_threads(1)
    if after:
        pkgutil.resolve_name(after)()
    with cuda_on_cpu():
        import pp_free_warmup._warmup
        import pp_free_warmup.testing.models  # noqa: F401
    while True:
        try:
            trial = _get(sys.stdin.buffer)
        except EOFError:
            return
        _put(answers, _run(trial))


def _run(trial: Trial) -> list[Ending]:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
        free.close()
        began = time.monotonic()
        host = _fork(lambda: _host(port, trial)) if trial.store == "agent" else None
        place = {"file": f"file://{folder}/store"}.get(trial.store, f"tcp://{LOOPBACK}:{port}")
        children = [_Child(trial, rank, place, folder) for rank in range(trial.ranks)]
        try:
            return _watch(children, began, trial.deadline)
        finally:
            for pid in filter(None, [host, *(child.pid for child in children)]):
                _end(pid)


class _Child:
    """One forked rank, its answer's pipe, and the file that it prints into."""

    def __init__(self, trial: Trial, rank: int, place: str, folder: str) -> None:
        self.printed = Path(folder, f"printed by {rank}")
        self.answer, theirs = os.pipe()
        self.pid: int | None = _fork(lambda: self._main(trial, rank, place, theirs))
        os.close(theirs)

    def _main(self, trial: Trial, rank: int, place: str, answer: int) -> None:
        printed = os.open(self.printed, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        with os.fdopen(answer, "wb") as stream:
            _put(stream, _outcome(trial, rank, place))


def _fork(main: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        main()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def _host(port: int, trial: Trial) -> None:
    import torch.distributed as dist

    store = dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False)
    time.sleep(trial.deadline + 60)
    del store


def _outcome(trial: Trial, rank: int, place: str) -> Ending:
    import logging

    import torch
    import torch.distributed as dist

    from pp_free_warmup.testing import cuda_on_cpu

    sys.path[:] = trial.path
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    began = time.monotonic()
    try:
        random.seed(1234)  # which a fork seeds anew
        torch.manual_seed(1234)
        with cuda_on_cpu():
            function: Any = __import__(trial.module)
            for name in trial.function.split("."):
                function = getattr(function, name)
            patience = timedelta(seconds=trial.group_timeout)
            rendezvous = {"init_method": place, "rank": rank, "world_size": trial.ranks}
            if trial.store == "agent":
                store = dist.TCPStore(LOOPBACK, int(place.rpartition(":")[2]), is_master=False, timeout=patience)
                rendezvous = {"store": store, "rank": rank, "world_size": trial.ranks}
            dist.init_process_group("gloo", timeout=patience, **rendezvous)
            return Ending("returned", function(*trial.arguments), seconds=time.monotonic() - began)
    except BaseException as error:  # noqa: BLE001 - how a rank ends is what a trial asks
        return Ending("raised", type(error).__name__, traceback.format_exc(), time.monotonic() - began)


def _watch(children: list[_Child], began: float, deadline: float) -> list[Ending]:
    endings: dict[int, Ending] = {}
    waiting = {child.answer: rank for rank, child in enumerate(children)}
    while waiting and time.monotonic() - began < deadline:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - (time.monotonic() - began)))
        for answer in ready:
            rank = waiting.pop(answer)
            endings[rank] = _received(children[rank], time.monotonic() - began)
    for rank in waiting.values():
        endings[rank] = _hung(children[rank], time.monotonic() - began)
    return [endings[rank] for rank in range(len(children))]


def _received(child: _Child, seconds: float) -> Ending:
    with os.fdopen(child.answer, "rb") as stream:
        try:
            ending = _get(stream)
        except EOFError:
            ending = Ending("killed")
    return Ending(ending.kind, ending.value, ending.text, seconds, child.printed.read_text(errors="replace"))


def _hung(child: _Child, seconds: float) -> Ending:
    assert child.pid is not None
    os.kill(child.pid, signal.SIGUSR1)
    time.sleep(0.5)
    os.close(child.answer)
    printed = child.printed.read_text(errors="replace")
    return Ending("hung", text=printed[-4000:], seconds=seconds, printed=printed)


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
