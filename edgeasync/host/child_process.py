"""Runs a module of this package in a new process that ends with this one."""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping

_DIE_WITH_PARENT = 1
"""The option PR_SET_PDEATHSIG of Linux's prctl."""


def run_module(
    module: str, request: bytes, timeout_s: float, environment: Mapping[str, str] = {}
) -> subprocess.CompletedProcess[bytes]:
    """Run `python -m module` with `request` as standard input. Return its exit code and output.

    `environment` adds variables to those of this process. Raises `subprocess.TimeoutExpired`.
    """
    # Search the same folders for modules as this process. `-P` prevents a search in the working
    # directory.
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    return subprocess.run(  # noqa: S603 - it is this Python and a module of this package
        [sys.executable, "-P", "-m", module],
        input=request,
        capture_output=True,
        env=variables,
        timeout=timeout_s,
        check=False,
    )


def end_with_parent() -> None:
    """End this process if its parent ends, or on Ctrl-C. Call it first in the new process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def limit_memory(bytes_max: int) -> None:
    """Limit the memory that this process allocates from now on, not counting libraries."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as sizes:  # noqa: PTH123
        pages = int(sizes.read().split()[0])
        lower_limit(resource.RLIMIT_AS, bytes_max + pages * resource.getpagesize())


def lower_limit(kind: int, wanted: int) -> None:
    """Lower a resource limit of this process, unless the limit is already lower."""
    _, hard = resource.getrlimit(kind)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (limit, limit))


def last_line(stderr: bytes, code: int) -> str:
    """Return the last line that a failed process wrote to standard error, or else its exit code."""
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {code}"
