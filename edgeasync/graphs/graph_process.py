"""A model's file read and differentiated in a process of its own, which ends where the model takes too much.

Who made the file may be unknown. Its forward run, which measures shapes, may loop for ever or ask for any amount
of memory, and a defect in a library that reads it would end the process: so the commands build apart from theirs.
"""

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys

import msgspec
import numpy as np

from edgeasync import errors
from edgeasync.config import convert, to_table
from edgeasync.errors import EdgeAsyncError, GraphError
from edgeasync.graphs.graph_model import HubGraph, load_graph
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.host.host_info import half_of_memory_bytes
from edgeasync.parameters import ParameterSpec
from edgeasync.protocol.messages import Frozen

_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""

_NO_MEMORY = re.compile(r"bad_alloc|out of memory|allocat\w+ memory", re.IGNORECASE)
"""What libraries say when they get no memory."""


class _Built(msgspec.Struct, tag="built"):
    graph: bytes
    spec: ParameterSpec
    initial: bytes
    forward: bytes | None
    frozen: Frozen | None
    warnings: tuple[str, ...]


class _Refused(msgspec.Struct, tag="refused"):
    """An `EdgeAsyncError` by its name, and what it says."""

    error: str
    sentence: str
    out_of_memory: bool


def load_graph_apart(model: OnnxModel) -> HubGraph:
    """Do what `load_graph` does, within the model's `build_s_max` and `build_memory_bytes_max`.

    Raises the same errors, and `GraphError` if a limit was reached.
    """
    # The same modules as here, and none from the folder that the command runs in unless it is searched here too.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MALLOC_ARENA_MAX": "2"}
    try:
        ended = subprocess.run(  # noqa: S603 - it is this Python and this module
            [sys.executable, "-P", "-m", __name__],
            input=msgspec.json.encode(to_table(model)),
            capture_output=True,
            env=environment,
            timeout=model.build_s_max,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise GraphError(_out_of_time(model)) from None
    if ended.returncode:
        raise _died(model, ended.returncode, ended.stderr)
    answer = msgspec.msgpack.decode(ended.stdout, type=_Built | _Refused)
    if isinstance(answer, _Refused):
        over = f"; {_out_of_memory(model)}" if answer.out_of_memory else ""
        raise getattr(errors, answer.error)(answer.sentence + over)
    initial = np.frombuffer(bytearray(answer.initial), np.float32)
    warnings = tuple(map(errors.with_flags, answer.warnings))
    return HubGraph(answer.graph, answer.spec, initial, answer.forward, answer.frozen, warnings)


def _died(model: OnnxModel, code: int, said: bytes) -> EdgeAsyncError:
    """Return what it means that the process ended without an answer."""
    if -code == signal.SIGXCPU:
        return GraphError(_out_of_time(model))
    if code < 0:
        name = signal.Signals(-code).name
        return GraphError(
            f"{model.file}: building its training graph was ended by {name}; {_out_of_memory(model)}"
        )
    lines = said.decode(errors="replace").strip().splitlines()
    return EdgeAsyncError(
        f"{model.file}: building its training graph failed ({lines[-1] if lines else f'exit code {code}'}); "
        "this is a defect of edgeasync: please report the model"
    )


def _out_of_time(model: OnnxModel) -> str:
    return (
        f"{model.file}: its training graph is not built after {model.build_s_max:g} s, the limit of [model] "
        "build_s_max; raise that if you trust the file"
    )


def _out_of_memory(model: OnnxModel) -> str:
    return (
        f"it may take {_bytes_max(model)} bytes of memory, the limit of [model] build_memory_bytes_max; "
        "raise that if you trust the file"
    )


def _bytes_max(model: OnnxModel) -> int:
    """Return the most memory that a build may take; without a setting, half of the machine's."""
    return int(model.build_memory_bytes_max or half_of_memory_bytes() or resource.RLIM_INFINITY)


# -- in the process --------------------------------------------------------------------------------------------


def main() -> None:
    """Answer one request on standard input."""
    answers = os.dup(1)
    os.dup2(2, 1)  # a library that prints must not spoil the answer
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    model = convert(msgspec.json.decode(sys.stdin.buffer.read()), OnnxModel, where="the request")
    with contextlib.suppress(ModuleNotFoundError):  # `load_graph` says that
        import onnx  # noqa: F401, PLC0415
        import onnxruntime  # noqa: F401, PLC0415
    _limit(model)
    answer = msgspec.msgpack.encode(_answer(model))
    with os.fdopen(answers, "wb") as out:
        out.write(answer)


def _limit(model: OnnxModel) -> None:
    """Bound what comes from here on; memory that the libraries hold already does not count."""
    _set_limit(resource.RLIMIT_CPU, int(model.build_s_max * (os.cpu_count() or 1)) + 1)
    bytes_max = _bytes_max(model)
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as sizes:  # noqa: PTH123
        pages = int(sizes.read().split()[0])
        _set_limit(resource.RLIMIT_AS, bytes_max + pages * resource.getpagesize())


def _set_limit(kind: int, wanted: int) -> None:
    """Lower a limit of this process; one that is lower already stays."""
    _, hard = resource.getrlimit(kind)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (limit, limit))


def _answer(model: OnnxModel) -> _Built | _Refused:
    try:
        found = load_graph(model)
    except MemoryError:
        return _Refused("GraphError", f"{model.file}: there is not the memory to build its training graph", True)
    except EdgeAsyncError as error:
        return _Refused(type(error).__name__, str(error), bool(_NO_MEMORY.search(str(error))))
    return _Built(found.graph, found.spec, found.initial.tobytes(), found.forward, found.frozen, found.warnings)


if __name__ == "__main__":
    main()
