"""Opens onnxruntime sessions on small devices, and explains onnxruntime's errors."""

import contextlib
import logging
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import onnxruntime

from edgeasync.errors import DataError, GraphError, NoMemoryError, native_reason
from edgeasync.protocol.protobuf import fields, packed, raw_fields
from edgeasync.training.tensor_check import DIMS_MAX

Provider = Literal["auto", "cpu", "cuda", "tensorrt"]
"""The execution provider; `auto` uses a GPU if onnxruntime supports it here."""

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
SMALLEST_GRAPH = bytes.fromhex(
    "080812003a370a100a017812017922084964656e746974791201675a0f0a0178120a0a08080112040a020801"
    "620f0a0179120a0a08080112040a02080142040a001011"
)
"""The serialized model `y = Identity(x)`, for testing whether a provider starts."""

LATE = ["ConvActivationFusion", "GemmActivationFusion"]
"""Optimizers of onnxruntime that are disabled. It runs the nodes that they create after all others
that can run, so the backward pass would start too early. Layouts for frozen convolutions, which
save a third of their time, stay enabled.
"""

PACKED_BYTES_MAX = 256 << 20
"""Maximum size of float32 constants of which onnxruntime may store copies, packed for fast products.

The copies of a language model with 490 MB of constants saved no time, and took 360 MB.
"""

_MODEL_GRAPH, _GRAPH_INITIALIZER, _DIMS, _DATA_TYPE, _FLOAT = 7, 5, 1, 2, 1
"""Field numbers of `onnx.proto`, and the number of the type float32."""

_log = logging.getLogger(__name__)


def open_session(
    graph: bytes, threads: int, provider: Provider, *, base_folder: Path | None = None
) -> onnxruntime.InferenceSession:
    """Return a session that uses `threads` cores and no CPU time between steps.

    If the graph has a base, `base_folder` must contain it. onnxruntime maps the base, and reads it
    only from the folder of the graph's file. So the graph is written there while it is loaded.

    If the provider is missing or fails to start, log a warning and use the CPU instead. So boards
    with and without a GPU can share a settings file.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised, so do not log them
    # Spinning threads speed up small operators within a step, but would drain a battery between
    # steps.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Do not round activations to int8 before products with quantized weights, as is the default.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    # One memory block for all tensors of a step would need a fifth more memory, and is not faster.
    options.enable_mem_pattern = False
    # Run nodes in the order of the graph, in which each gradient is used soon. By default, onnxruntime
    # first computes the gradients of all activations, and keeps them for those of the parameters.
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    if float_bytes(graph) > PACKED_BYTES_MAX:
        options.add_session_config_entry("session.disable_prepacking", "1")
    chosen = _providers(provider, onnxruntime.get_available_providers())
    try:
        with contextlib.nullcontext(graph) if base_folder is None else _written(graph, base_folder) as model:
            session = onnxruntime.InferenceSession(model, options, chosen, disabled_optimizers=LATE)
    except Exception as error:
        raise GraphError(
            f"onnxruntime cannot load the graph: {native_reason(error)}; install a newer onnxruntime"
        ) from error
    taken = session.get_providers()
    if chosen[0] not in taken:
        _log.warning("provider %s failed to start, using the CPU; install its driver and libraries", chosen[0])
    _log.info("provider: %s", ", ".join(taken))
    return session


@contextlib.contextmanager
def _written(graph: bytes, folder: Path) -> Iterator[Path]:
    """Write a graph to a file in `folder`, which is deleted afterwards."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="graph-", suffix=".onnx") as file:
        file.write(graph)
        file.flush()
        yield Path(file.name)


def float_bytes(graph: bytes) -> int:
    """Return the size of a graph's float32 constants, in the graph itself and in its base.

    Raises `GraphError` if the graph is damaged.
    """
    count = 0
    for number, _, model_field in raw_fields(memoryview(graph)):
        for inner, _, tensor in raw_fields(model_field) if number == _MODEL_GRAPH else ():
            if inner == _GRAPH_INITIALIZER:
                count += _floats(tensor)
    return 4 * count


def _floats(tensor: memoryview) -> int:
    dims, kind = list[int](), 0
    for number, value in fields(tensor):
        if number == _DIMS:
            dims += packed(value, DIMS_MAX)
        elif number == _DATA_TYPE and isinstance(value, int):
            kind = value
    return math.prod(dims) if kind == _FLOAT else 0


def providers_that_start(provider: Provider, threads: int) -> list[str]:
    """Return the execution providers of a test session, or `[]` if the session does not start."""
    try:
        return list(open_session(SMALLEST_GRAPH, threads, provider).get_providers())
    except GraphError:
        return []


def _providers(provider: Provider, available: list[str]) -> list[str]:
    if provider == "auto":
        # Not TensorRT: it compiles for minutes, so users must ask for it.
        provider = "cuda" if PROVIDERS["cuda"] in available else "cpu"
    wanted = [PROVIDERS[provider]]
    if provider == "tensorrt":
        wanted.append(PROVIDERS["cuda"])
    if wanted[0] not in available:
        _log.warning(
            "this onnxruntime has no provider %s, continuing without; it has %s", wanted[0], ", ".join(available)
        )
    found = [name for name in wanted if name in available]
    return found if found == [PROVIDERS["cpu"]] else [*found, PROVIDERS["cpu"]]


def explain(error: Exception) -> DataError | GraphError | NoMemoryError:
    """Convert an exception of onnxruntime to one of edgeasync.

    An index out of range is an error in the data.
    """
    sentence = " ".join(str(error).split())
    if "out of data bounds" in sentence:
        detail = sentence.rpartition("Status Message: ")[2]
        return DataError(
            f"the data contains a token or label that is out of range for the hub's model ({detail}); number "
            "tokens and classes from 0, and remove those that the model does not have"
        )
    if "allocate memory" in sentence or "bad_alloc" in sentence:
        return NoMemoryError(f"not enough memory for a run: {native_reason(error)}")
    return GraphError(f"the hub's model fails on this device: {native_reason(error)}")
