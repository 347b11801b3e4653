"""A process that has imported torch and Megatron and does nothing but fork: ranks that start in no time.

Started by `_rank_process` as ``python -m pp_free_warmup.testing._rank_template FD``. It runs no
thread and no tensor operation, so that a fork of it is as good as a new process.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from pp_free_warmup.testing import _rank_worker
from pp_free_warmup.testing._cuda_on_cpu import cuda_on_cpu

MESSAGE = 1 << 20


def main(descriptor: int) -> None:
    """Fork a rank for each request on socket *descriptor*, until the test process is gone."""
    with cuda_on_cpu():
        pass  # imports Megatron
    gc.collect()
    gc.freeze()
    folders: dict[int, str] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _note_ended(folders))
    with socket.socket(fileno=descriptor) as requests:
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, MESSAGE, 1)
            if not message:
                return
            folder, environment = json.loads(message)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            pid = os.fork()
            if pid == 0:
                requests.close()
                _be_a_rank(descriptors[0], folder, environment)
            folders[pid] = folder
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            os.close(descriptors[0])
            requests.sendall(f"{pid}\n".encode())


def _note_ended(folders: dict[int, str]) -> None:
    """Write down how forked ranks ended, where the test process looks for it."""
    for pid in list(folders):
        ended, status = os.waitpid(pid, os.WNOHANG)
        folder = Path(folders[pid])
        if ended:
            del folders[pid]
            if folder.exists():
                (folder / "ended").write_text(str(os.waitstatus_to_exitcode(status)))


def _be_a_rank(descriptor: int, folder: str, environment: dict[str, str]) -> None:
    """Serve jobs in the forked process, and never return into the template."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.setsid()
        printed = os.open(Path(folder, "printed"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.environ.update(environment)
        _rank_worker.main(descriptor)
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must not run on as a second template
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
