"""Starts `edgeasync` commands by forking a process that has already imported the package.

A hub listens after 0.1 s instead of 0.3 s. Each process of pytest has one server. The server ends with it, and
kills the commands that still run.

A forked command differs from `python -m edgeasync`: onnx and onnxruntime are imported, all forks order sets alike
(one hash seed), and /proc shows the server's command line. `forkable` says which commands may be forked at all.
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
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[3]

PRELOADED = (
    "edgeasync.cli.agent", "edgeasync.cli.hub", "edgeasync.cli.peer", "edgeasync.training.onnx_trainer", "onnx",
    "onnxruntime", "uvloop",
)  # fmt: skip

READ_AT_START = ("LANG", "LC_", "LD_", "OMP_", "OPENBLAS_", "PYTHON")
"""How the environment variables begin that an interpreter and its libraries read only when they start."""

REQUEST_BYTES_MAX = 1 << 17


def forkable(environment):
    """Return whether a command with this environment runs in a fork as it would in a new interpreter."""
    _, server_environment = start_server()
    different = dict(environment.items() ^ server_environment.items())
    return not any(name.startswith(READ_AT_START) for name in different)


class ForkedCommand:
    """An `edgeasync` command that runs, with the interface of `subprocess.Popen` that tests use."""

    def __init__(self, arguments, folder, environment):
        request = json.dumps([list(map(str, arguments)), str(folder), environment]).encode()
        assert len(request) <= REQUEST_BYTES_MAX
        (stdin, ours), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
        self.stdin, self.stdout, self.stderr = os.fdopen(ours, "w"), os.fdopen(out), os.fdopen(err)
        self._reply, reply = socket.socketpair()
        self._told, self._lock = self._reply.makefile(), threading.Lock()
        with reply:
            socket.send_fds(start_server()[0], [request], [stdin, stdout, stderr, reply.fileno()])
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        self.returncode, self.pid = None, self._read()

    def _read(self):
        line = self._told.readline()
        assert line, "the fork server has ended"
        return int(line)

    def poll(self):
        """Return the exit code, or None while the command runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        """Wait for the end; return the exit code, or minus the number of the signal that ended the command."""
        if self.returncode is None:
            replies = select.poll()
            replies.register(self._reply, select.POLLIN)
            if not replies.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("edgeasync", timeout)
            with self._lock:
                if self.returncode is None:
                    self.returncode = self._read()
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
    """Start this process's server; return the socket for requests, and the environment that it started with."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.programs.fork_server", str(theirs.fileno())],
            # onnxruntime's telemetry has a thread, and a process that forks must have no other.
            cwd=ROOT, env=environment | {"ORT_DISABLE_TELEMETRY": "1"}, pass_fds=[theirs.fileno()],
        )  # fmt: skip

    def end():
        ours.close()
        server.wait()

    atexit.register(end)
    return ours, environment


def serve(requests):
    """Fork for each request; tell each requester the pid and then the exit code.

    In a command's process it returns the request and the descriptors of its streams; in the server it returns None
    when there are no more requests.
    """
    running, ended = {}, {}
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in running:
                pid, reply = running.pop(descriptor)
                poll.unregister(descriptor)
                tell(reply, exit_code(os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT)))
                os.close(descriptor)
                ended[reply.fileno()] = pid, reply
                poll.register(reply, select.POLLIN)
                continue
            if descriptor in ended:  # the requester knows the exit code, so the pid may go to another process
                pid, reply = ended.pop(descriptor)
                poll.unregister(descriptor)
                reply.close()
                os.waitpid(pid, 0)
                continue
            request, streams, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 4)
            if not request:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            pid = os.fork()
            if not pid:
                for kept in (*running, *[reply.fileno() for _, reply in running.values()], *ended, streams[3]):
                    os.close(kept)
                requests.close()
                return json.loads(request), streams[:3]
            for passed in streams[:3]:
                os.close(passed)
            reply = socket.socket(fileno=streams[3])
            tell(reply, pid)
            process = os.pidfd_open(pid)
            running[process] = pid, reply
            poll.register(process, select.POLLIN)


def exit_code(status):
    """Return the exit code, or minus the number of the signal that ended the process."""
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def tell(requester, number):
    """Send a pid or an exit code, unless the requester is gone."""
    with contextlib.suppress(BrokenPipeError):
        requester.sendall(f"{number}\n".encode())


def run_command(request, streams):
    """Become `python -m edgeasync` in a folder, with an environment and streams of its own."""
    arguments, folder, environment = request
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    # Open the standard streams as Python opens pipes under PYTHONUNBUFFERED.
    sys.stdin = os.fdopen(0)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0), write_through=True, errors="backslashreplace")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    sys.path[0] = folder
    runpy.run_module("edgeasync", run_name="__main__", alter_sys=True)


def main():
    """Serve requests from the socket whose descriptor is on the command line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest, which ends the requests
    for module in PRELOADED:
        importlib.import_module(module)
    threads = len([*Path("/proc/self/task").iterdir()])
    assert threads == 1, f"{threads} threads: a fork would have only one, and the locks of the others"
    gc.freeze()  # the collector would write to pages that the processes share
    if found := serve(socket.socket(fileno=int(sys.argv[1]))):
        try:
            run_command(*found)
        except Exception:  # noqa: BLE001 - as an interpreter does, which ends with 1
            traceback.print_exc()
            os._exit(1)


if __name__ == "__main__":
    main()
