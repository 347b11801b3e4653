"""The process of one rank, as the test process sees it."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from pp_free_warmup.testing._rank_job import Job, Outcome

# What each rank's process gets beside the test process's own environment.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo"}
# Seconds that a killed process may take to be gone.
END = 10.0


@dataclass
class Worker:
    """One rank process, leader of its own process group.

    Attributes:
        pid: The process.
        connection: This end of the connection; the process dies when it closes.
        folder: Holds what the process prints, how it ended, and its compile caches if it was started fresh.
    """

    pid: int
    connection: Connection
    folder: tempfile.TemporaryDirectory[str] = field(repr=False)
    _process: subprocess.Popen[bytes] | None = None
    _template: Template | None = None

    @classmethod
    def start(cls, environment: Mapping[str, str]) -> Worker:
        """Start a process that says when it is ready for jobs.

        Without GPUs it is forked from the template, which takes milliseconds; with GPUs it is a
        process from the ground up, since CUDA and fork do not go together.
        """
        folder = tempfile.TemporaryDirectory(prefix="ranks-")
        ours, theirs = Pipe()
        own = {name: value.format(folder=folder.name) for name, value in environment.items()}
        with theirs, ExitStack() as unless_started:
            unless_started.callback(folder.cleanup)
            unless_started.callback(ours.close)
            if environment.get("CUDA_VISIBLE_DEVICES") == "":
                template = _template()
                pid = template.fork(theirs.fileno(), folder.name, own)
                worker = cls(pid, ours, folder, _template=template)
            else:
                process = _python("_rank_worker", theirs.fileno(), own, Path(folder.name, "printed"))
                worker = cls(process.pid, ours, folder, process)
            unless_started.pop_all()
            return worker

    @property
    def printed(self) -> str:
        """What the process has printed since the last job began."""
        return Path(self.folder.name, "printed").read_text(errors="replace")

    def send(self, job: Job) -> None:
        """Begin *job* with an empty page."""
        os.truncate(Path(self.folder.name, "printed"), 0)
        self.connection.send_bytes(pickle.dumps(job))

    def stop(self) -> None:
        """Kill the process and everything it started."""
        self.connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._exit_code()
        self.folder.cleanup()

    def outcome(self) -> Outcome:
        """Receive how the job ended, or that the process did."""
        try:
            outcome: Outcome = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            code = self._exit_code()
            reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return Outcome("raised", text=f"The process of this rank died: {reason}.")
        return outcome

    def stacks(self) -> str:
        """Ask a process that does not answer where it is, and give it a second to write that down."""
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(1.0)
        return self.printed[-12000:]

    def _exit_code(self) -> int:
        """Wait until the process is gone, and return its exit code, or minus its signal."""
        if self._process is not None:
            return self._process.wait(END)
        ended, deadline = Path(self.folder.name, "ended"), time.monotonic() + END
        while not (ended.exists() and ended.read_text()):
            if self._template is None or self._template.is_gone():
                return -signal.SIGKILL  # nobody is left who would know better
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank process {self.pid} was killed and is still there after {END:.0f} s")
            time.sleep(0.01)
        return int(ended.read_text())


def _python(module: str, descriptor: int, environment: Mapping[str, str], printed: Path) -> subprocess.Popen[bytes]:
    """Run a module of this package in a process of its own session that inherits *descriptor*."""
    path = {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    with printed.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.{module}", str(descriptor)],
            env={**os.environ, **ENVIRONMENT, **path, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[descriptor],
            start_new_session=True,
        )


class Template:
    """The process that ranks are forked from; it ends when this one does."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._requests, theirs = socket.socketpair()
        printed = Path(self._folder.name, "printed")
        self._process = _python("_rank_template", theirs.fileno(), {"CUDA_VISIBLE_DEVICES": ""}, printed)
        theirs.close()

    def fork(self, descriptor: int, folder: str, environment: Mapping[str, str]) -> int:
        """Fork a rank that takes jobs from *descriptor*, and return its process id."""
        message = json.dumps([folder, dict(environment)]).encode()
        try:
            socket.send_fds(self._requests, [message], [descriptor])
            answer = self._requests.recv(64)
        except BaseException:
            # A late answer would be taken for that to the next request.
            self.stop()
            raise
        if not answer:
            printed = Path(self._folder.name, "printed").read_text(errors="replace")
            self.stop()
            raise RuntimeError(f"The process that ranks are forked from ended:\n{printed[-4000:]}")
        return int(answer)

    def is_gone(self) -> bool:
        """Tell whether the process has ended."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """End the process, so that the next rank is forked from a new one."""
        _templates.clear()
        self._requests.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


_templates: list[Template] = []


def _template() -> Template:
    """Return the one template, started when the first rank is."""
    if not _templates:
        _templates.append(Template())
    return _templates[0]


@atexit.register  # at import, and so after the pools, whose processes the template still waits for
def _stop_template() -> None:
    while _templates:
        _templates[0].stop()
