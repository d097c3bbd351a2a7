"""Records which model a run trains, so that no other model receives its trained arrays.

A training graph names the checksum of the frozen values of its source, the model that the user
passed. So does a forward model with adapters or quantized weights, because a hub may resume from
it. The training graph in a run's folder also names the SHA-256 of the forward model beside it.
"""

from collections.abc import Collection
from pathlib import Path

from edgeasync.autodiff.contents import SOURCE
from edgeasync.durable.run_folder import FORWARD_FILE, TRAINING_FILE
from edgeasync.errors import GraphError, ModelMismatchError, StorageError
from edgeasync.protocol.graph import fingerprint_of
from edgeasync.protocol.messages import Frozen
from edgeasync.protocol.protobuf import message, raw_fields
from edgeasync.regular_file import read_regular
from edgeasync.training.frozen import FrozenArray, frozen_checksum, pieces_of

_FORWARD = "edgeasync.forward"
"""Metadata key with the SHA-256 of the forward model in the run's folder."""

_MODEL_METADATA, _KEY, _VALUE = 14, 1, 2
"""Field numbers of `onnx.proto`."""


def frozen_of(model: bytes, trained: Collection[str]) -> Frozen | None:
    """Return the checksum of a forward model's arrays except `trained`, or `None` without any."""
    from edgeasync.autodiff.inspection import frozen_arrays  # noqa: PLC0415 - devices do not install onnx

    return frozen_checksum(
        "onnx", (FrozenArray(name, a.shape, pieces_of(a)) for name, a in frozen_arrays(model, trained))
    )


def source_in(model: bytes) -> str | None:
    """Return the checksum of the source that a serialized model names."""
    return _metadata(model).get(SOURCE)


def with_source(model: bytes, source: str) -> bytes:
    """Return a serialized model that names the checksum of its source."""
    return model + _entry(SOURCE, source)


def with_forward(graph: bytes, forward: bytes) -> bytes:
    """Return a run's training graph that names the SHA-256 of the run's forward model."""
    return graph + _entry(_FORWARD, fingerprint_of(forward))


def held_file(path: Path) -> bytes | None:
    """Return the content of a file in a run's folder, or `None` if the file does not exist.

    Raises `StorageError`.
    """
    try:
        return read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be read: {error.strerror}; remove the file, or choose another run folder"
        ) from error


def held_forward(run: Path, again: bytes | None = None) -> bytes | None:
    """Return the forward model in a run's folder, or `None` if the folder contains none.

    If the file is missing or has changed since the run wrote it, return `None` if `again` has its
    old content, and raise `StorageError` otherwise.
    """
    forward, graph = held_file(run / FORWARD_FILE), held_file(run / TRAINING_FILE)
    if graph is None:
        return forward
    written = _of_run(run, graph).get(_FORWARD)
    if written == (None if forward is None else fingerprint_of(forward)):
        return forward
    if written is None:
        raise _damaged_graph(run, "")
    if again is not None and fingerprint_of(again) == written:
        return None
    raise StorageError(
        f"{run / FORWARD_FILE}: {'missing' if forward is None else 'damaged or edited after the run wrote it'}; "
        "restore the file, or start the hub once more with the same model and settings but without --resume, "
        "which writes it again"
    )


def begun_with_forward(run: Path, graph: bytes) -> bool:
    """Return whether a run with this training graph was started with a forward model."""
    return _FORWARD in _of_run(run, graph)


def check_source(path: Path, content: bytes, run: Path, trained: Collection[str], source: Path | None) -> None:
    """Raise `ModelMismatchError` if a run did not train the forward model in the file `path`.

    `trained` are the names of the run's arrays. `source` is the file that the run was started with,
    if it is known. A run without a training graph does not know its model, and accepts any.
    """
    if (graph := held_file(run / TRAINING_FILE)) is None:
        return
    stated = _of_run(run, graph)
    if stated.get(_FORWARD) == fingerprint_of(content):
        return
    if stated.get(SOURCE) == checksum_of(frozen_of(content, trained)):
        return
    own = "the original model" if source is None else str(source)
    if _FORWARD not in stated:
        own = f"the model that {own} was built from"
    raise ModelMismatchError(
        f"{path}: the frozen values differ from those of {own}, which {run} was trained on; pass that with --model"
    )


def checksum_of(frozen: Frozen | None) -> str:
    """Return a checksum as text, which is empty if nothing is frozen."""
    return "" if frozen is None else frozen.checksum


def _of_run(run: Path, graph: bytes) -> dict[str, str]:
    try:
        return _metadata(graph)
    except GraphError as error:
        raise _damaged_graph(run, f" ({error})") from error


def _damaged_graph(run: Path, cause: str) -> StorageError:
    return StorageError(
        f"{run / TRAINING_FILE}: damaged{cause}; remove the file, and start the hub of this run once more"
    )


def _metadata(model: bytes) -> dict[str, str]:
    found = {}
    for number, _, entry in raw_fields(memoryview(model)):
        if number == _MODEL_METADATA:
            parts = {inner: str(content, "utf-8", "replace") for inner, _, content in raw_fields(entry)}
            found[parts.get(_KEY, "")] = parts.get(_VALUE, "")
    return found


def _entry(key: str, value: str) -> bytes:
    return message(_MODEL_METADATA, message(_KEY, key.encode()) + message(_VALUE, value.encode()))
