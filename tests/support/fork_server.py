"""Starts `edgeasync` commands by forking a process that has already imported the package.

A start takes some 10 ms instead of some 300. Each process of pytest has one server. The server has no threads. It
ends when its pytest process does, and kills the commands that still run.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]

PRELOADED = (
    "edgeasync.cli.agent", "edgeasync.cli.hub", "edgeasync.cli.peer", "edgeasync.training.onnx_trainer", "onnx",
    "onnxruntime", "uvloop",
)  # fmt: skip

REQUEST_BYTES_MAX = 1 << 17


class ForkedCommand:
    """An `edgeasync` command that runs, with the interface of `subprocess.Popen` that tests use."""

    def __init__(self, arguments, folder, environment):
        (stdin, ours), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
        self._reply, reply = socket.socketpair()
        request = json.dumps([list(map(str, arguments)), str(folder), environment]).encode()
        with reply:
            socket.send_fds(start_server(), [request], [stdin, stdout, stderr, reply.fileno()])
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        self.stdin, self.stdout, self.stderr = os.fdopen(ours, "w"), os.fdopen(out), os.fdopen(err)
        self._told, self._lock = self._reply.makefile(), threading.Lock()
        self.pid, self.returncode = int(self._told.readline()), None

    def poll(self):
        """Return the exit code, or None while the command runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        """Wait for the end; return the exit code, or minus the number of the signal that ended the command."""
        with self._lock:
            if self.returncode is None:
                if not select.select([self._reply], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("edgeasync", timeout)
                self.returncode = int(self._told.readline())
                self._told.close()
                self._reply.close()
        return self.returncode

    def send_signal(self, number):
        """Send a signal, unless the command has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        """End the process as a power cut would."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def start_server():
    """Return the socket of this process's server."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())],
            cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, pass_fds=[theirs.fileno()],
        )  # fmt: skip

    def end():
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


def serve(requests):
    """Fork for each request; tell each requester the pid and then the exit code.

    In a command's process it returns the request and the descriptors of its streams; in the server it returns None
    when there are no more requests.
    """
    running = {}
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != requests.fileno():
                poll.unregister(descriptor)
                os.close(descriptor)
                pid, reply = running.pop(descriptor)
                with reply, contextlib.suppress(BrokenPipeError):
                    reply.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
                continue
            request, streams, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 4)
            if not request:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            pid = os.fork()
            if not pid:
                for kept in (*running, *[reply.fileno() for _, reply in running.values()], streams[3]):
                    os.close(kept)
                requests.close()
                return json.loads(request), streams[:3]
            for passed in streams[:3]:
                os.close(passed)
            reply = socket.socket(fileno=streams[3])
            reply.sendall(f"{pid}\n".encode())
            ended = os.pidfd_open(pid)
            running[ended] = pid, reply
            poll.register(ended, select.POLLIN)


def run_command(request, streams):
    """Become `python -m edgeasync` in a folder, with an environment and streams of its own."""
    arguments, folder, environment = request
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    # What Python makes of standard streams that are pipes, with PYTHONUNBUFFERED.
    sys.stdin = os.fdopen(0)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0), write_through=True, errors="backslashreplace")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    sys.path[0] = folder
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    runpy.run_module("edgeasync", run_name="__main__", alter_sys=True)


def main():
    """Serve the requests that come in over the socket that is named on the command line."""
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # the collector would write to pages that the processes share
    if found := serve(socket.socket(fileno=int(sys.argv[1]))):
        run_command(*found)


if __name__ == "__main__":
    main()
