"""The process from which the workers of `engine="processes"` are forked, started by their parent.

    python -m edgeasync.sdk.workers.forker FOLDER REQUESTS PARENT

It has a single thread, and imports once the modules that all workers need. `FOLDER` contains the
workers' files. `REQUESTS` is a socket to the process `PARENT`. Each request contains a worker's
number. A request with a lifeline (a pipe) starts the worker; a request without a lifeline kills it.
When a worker has ended, the forker sends the worker's number and exit code. The forker ends when
the parent closes the socket or exits.
"""

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
from pathlib import Path

import numpy as np

from edgeasync.sdk.workers.base import worker_name
from edgeasync.sdk.workers.child import LOOK_S, main
from edgeasync.sdk.workers.files import MAKE_FILE

MESSAGE_BYTES_MAX = 64

NEEDED = {b"edgeasync.torch": ("torch._dynamo", "edgeasync.torch")}
"""Maps a name to the modules to import before forking if the pickled function contains this name.

These imports start no threads.
"""


def serve(folder: Path, requests: socket.socket, parent: int) -> None:
    """Fork or kill a worker for each request; report each worker's exit code."""
    content = (folder / MAKE_FILE).read_bytes()
    for name in (name for mark, names in NEEDED.items() if mark in content for name in names):
        importlib.import_module(name)
    gc.freeze()  # a fork then copies fewer pages
    pids: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while os.getppid() == parent:
            for key, _ in selector.select(LOOK_S):
                if key.fileobj is not requests:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    _answer(requests, key.data, pids.pop(key.data))
                    continue
                message, lifelines, _, _ = socket.recv_fds(requests, MESSAGE_BYTES_MAX, 1)
                if not message:
                    return
                number = int(message)
                if lifelines:
                    pids[number] = _begin(folder, requests, number, lifelines[0], parent)
                    selector.register(os.pidfd_open(pids[number]), selectors.EVENT_READ, number)
                elif number in pids:
                    os.kill(pids[number], signal.SIGKILL)


def _answer(requests: socket.socket, number: int, pid: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ConnectionError):  # the parent is gone; the loop will notice
        requests.send(f"{number} {code}".encode())


def _begin(folder: Path, requests: socket.socket, number: int, lifeline: int, parent: int) -> int:
    """Fork a worker; return its pid."""
    pid = os.fork()
    if not pid:
        try:
            requests.close()
            Path("/proc/self/comm").write_text(worker_name(number))  # the name that `top` shows
            np.random.seed()  # noqa: NPY002 - otherwise numpy draws the same numbers in all workers
            main(folder, number, lifeline, parent)
        finally:
            os._exit(1)
    os.close(lifeline)
    return pid


if __name__ == "__main__":
    serve(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
