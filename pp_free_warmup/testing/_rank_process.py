"""The process of one rank, as the test process sees it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from pp_free_warmup.testing._rank_job import Job, Outcome


@dataclass
class Worker:
    """One rank process.

    Attributes:
        process: The process, leader of its own process group.
        connection: This end of the connection; the worker dies when it closes.
        folder: Holds what the worker prints, and its compile caches if it was started fresh.
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    folder: tempfile.TemporaryDirectory[str] = field(repr=False)

    @classmethod
    def start(cls, environment: Mapping[str, str]) -> Worker:
        """Start a process that is ready for jobs once it has imported Megatron."""
        folder = tempfile.TemporaryDirectory(prefix="ranks-")
        ours, theirs = Pipe()
        own = {name: value.format(folder=folder.name) for name, value in environment.items()}
        with Path(folder.name, "printed").open("ab") as printed:
            process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}._rank_worker", str(theirs.fileno())],
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()
        return cls(process, ours, folder)

    @property
    def printed(self) -> str:
        """What the worker has printed since the last job began."""
        return Path(self.folder.name, "printed").read_text(errors="replace")

    def send(self, job: Job) -> None:
        """Begin *job* with an empty page."""
        os.truncate(Path(self.folder.name, "printed"), 0)
        self.connection.send_bytes(pickle.dumps(job))

    def stop(self) -> None:
        """Kill the process and everything it started."""
        self.connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.folder.cleanup()

    def outcome(self) -> Outcome:
        """Receive how the job ended, or that the process did."""
        try:
            outcome: Outcome = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            code = self.process.wait()
            reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return Outcome("raised", text=f"The process of this rank died: {reason}.")
        return outcome

    def stacks(self) -> str:
        """Ask a process that does not answer where it is, and give it a second to write that down."""
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        return self.printed[-12000:]
