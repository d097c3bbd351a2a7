"""Builds a training graph in a separate process whose time and memory are limited.

This is necessary because the model may be from an untrusted author. The build runs the model to
measure shapes, so a malicious model could loop forever or allocate any amount of memory. A bug in a
parsing library could also crash the process.
"""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgeasync import errors
from edgeasync.autodiff.contents import ModelContents
from edgeasync.config import convert, to_table
from edgeasync.errors import EdgeAsyncError, GraphError, StorageError
from edgeasync.graphs.graph_model import HubGraph, describe_model, load_graph
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.host.child_process import end_with_parent, last_line, limit_memory, lower_limit, run_module
from edgeasync.host.host_info import half_of_memory_bytes
from edgeasync.parameters import ParameterSpec
from edgeasync.protocol.messages import Frozen
from edgeasync.regular_file import read_regular
from edgeasync.temporary import TemporaryFolder

_ALLOCATOR = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Environment variables with which glibc returns the memory of large tensors to the system at once.
Otherwise, building a language model of 540 MB holds up to 0.7 GB more.
"""

_NO_MEMORY = re.compile(r"bad_alloc|out of memory|not enough memory|allocat\w+ memory", re.IGNORECASE)
"""Pattern of the error messages that libraries raise when memory is exhausted."""


class _Request(msgspec.Struct):
    """The model's settings, and where to build its training graph, or `None` to describe the file."""

    model: dict[str, Any]
    folder: str | None


_GRAPH, _INITIAL, _FORWARD = "graph", "initial", "forward"
"""Files of a build. They may be as large as the model, so copying them through a pipe would cost memory."""


class _Built(msgspec.Struct, tag="built"):
    spec: ParameterSpec
    has_forward: bool
    frozen: Frozen | None
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    in_chunks: bool


class _Refused(msgspec.Struct, tag="refused"):
    """A failed build: the class name and message of its `EdgeAsyncError`."""

    error: str
    sentence: str
    out_of_memory: bool


def load_graph_apart(model: OnnxModel) -> HubGraph:
    """Run `load_graph` in a separate process, within `build_s_max` and `build_memory_bytes_max`.

    Raises the same errors as `load_graph`, and `GraphError` if a limit was exceeded.
    """
    folder = TemporaryFolder("build-")
    try:
        return _read(folder.path, _build(model, folder.path))
    finally:
        folder.remove()


def _build(model: OnnxModel, folder: Path) -> _Built:
    """Build a training graph in a separate process, which writes its files to `folder`."""
    try:
        ended = _run(model, folder)
    except subprocess.TimeoutExpired:
        raise GraphError(_out_of_time(model)) from None
    if ended.returncode:
        raise _died(model, ended.returncode, ended.stderr)
    answer = msgspec.msgpack.decode(ended.stdout, type=_Built | _Refused)
    if isinstance(answer, _Refused):
        over = f"; {_out_of_memory(model)}" if answer.out_of_memory else ""
        raise getattr(errors, answer.error)(answer.sentence + over)
    return answer


def _read(folder: Path, built: _Built) -> HubGraph:
    graph = read_regular(folder / _GRAPH)
    initial = np.fromfile(folder / _INITIAL, np.float32)
    forward = read_regular(folder / _FORWARD) if built.has_forward else None
    return HubGraph(
        graph, built.spec, initial, forward, built.frozen, built.warnings, built.notes, built.in_chunks
    )


def describe_model_apart(model: OnnxModel) -> ModelContents | None:
    """Describe a model file that cannot be trained, in a separate process with the same limits.

    Return `None` if the file cannot be read, or if a limit was exceeded.
    """
    try:
        ended = _run(model, None)
    except subprocess.TimeoutExpired:
        return None
    return None if ended.returncode else msgspec.msgpack.decode(ended.stdout, type=ModelContents | None)


def _run(model: OnnxModel, folder: Path | None) -> subprocess.CompletedProcess[bytes]:
    request = msgspec.json.encode(_Request(to_table(model), None if folder is None else str(folder)))
    return run_module(__name__, request, model.build_s_max, _ALLOCATOR)


def _died(model: OnnxModel, code: int, said: bytes) -> EdgeAsyncError:
    """Return the error for a build process that exited without a reply."""
    if -code == signal.SIGXCPU:
        return GraphError(_out_of_time(model))
    if code < 0:
        name = signal.Signals(-code).name
        return GraphError(
            f"{model.file}: building its training graph was ended by {name}; {_out_of_memory(model)}"
        )
    return EdgeAsyncError(
        f"{model.file}: building its training graph failed ({last_line(said, code)}); "
        "this is a bug in edgeasync; please report it with the model"
    )


def _out_of_time(model: OnnxModel) -> str:
    return (
        f"{model.file}: building its training graph took longer than {model.build_s_max:g} s, the limit of "
        "[model] build_s_max; raise the limit if you trust the file"
    )


def _out_of_memory(model: OnnxModel) -> str:
    return (
        f"the memory limit is {memory_bytes_max(model)} bytes, set by [model] build_memory_bytes_max; "
        "raise the limit if you trust the file"
    )


def memory_bytes_max(model: OnnxModel) -> int:
    """Return the memory limit of a build in bytes. The default is half of the machine's memory."""
    return int(model.build_memory_bytes_max or half_of_memory_bytes() or resource.RLIM_INFINITY)


# -- in the process --------------------------------------------------------------------------------------------


def main() -> None:
    """Entry point of the build process: read a request from standard input, and write the reply."""
    answers = os.dup(1)
    os.dup2(2, 1)  # output of libraries must not mix with the reply
    end_with_parent()
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=_Request)
    model = convert(request.model, OnnxModel, where="the request")
    with contextlib.suppress(ModuleNotFoundError):  # `load_graph` reports this
        import onnx  # noqa: F401, PLC0415
        import onnxruntime  # noqa: F401, PLC0415
    lower_limit(resource.RLIMIT_CPU, int(model.build_s_max * (os.cpu_count() or 1)) + 1)
    limit_memory(memory_bytes_max(model))
    folder = request.folder
    answer = msgspec.msgpack.encode(_describe(model) if folder is None else _answer(model, Path(folder)))
    with os.fdopen(answers, "wb") as out:
        out.write(answer)


def _answer(model: OnnxModel, folder: Path) -> _Built | _Refused:
    try:
        found = load_graph(model)
        _write(folder, found)
    except MemoryError:
        return _Refused("GraphError", f"{model.file}: not enough memory to build its training graph", True)
    except EdgeAsyncError as error:
        return _Refused(type(error).__name__, str(error), bool(_NO_MEMORY.search(str(error))))
    has_forward = found.forward is not None
    return _Built(found.spec, has_forward, found.frozen, found.warnings, found.notes, found.in_chunks)


def _write(folder: Path, found: HubGraph) -> None:
    """Write the files of a build. Raises `StorageError`."""
    files = {_GRAPH: found.graph, _INITIAL: found.initial.data, _FORWARD: found.forward}
    try:
        for name, content in files.items():
            if content is not None:
                (folder / name).write_bytes(content)
    except OSError as error:
        raise StorageError(
            f"{folder}: cannot write the training graph: {error.strerror}; free space there, or set TMPDIR to "
            "another folder"
        ) from error


def _describe(model: OnnxModel) -> ModelContents | None:
    try:
        return describe_model(model)
    except (EdgeAsyncError, MemoryError):
        return None


if __name__ == "__main__":
    main()
