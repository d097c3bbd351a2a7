"""Loads a hub's ONNX model, builds its training graph, and stores both in the run's folder."""

from collections.abc import Collection
from pathlib import Path

import msgspec
import safetensors
import safetensors.numpy

from edgeasync.autodiff.contents import ModelContents
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.config import expanded
from edgeasync.durable.files import replace_file
from edgeasync.durable.run_folder import FORWARD_FILE, TRAINING_FILE
from edgeasync.errors import ConfigError, GraphError, ModelMismatchError, with_flags
from edgeasync.graphs.external_data import insert_external_data
from edgeasync.graphs.model_file import VALUES_SUFFIX
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.graphs.source import (
    begun_with_forward,
    checksum_of,
    frozen_of,
    held_file,
    held_forward,
    source_in,
    with_forward,
    with_source,
)
from edgeasync.losses import OnnxLoss
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.protocol.messages import Frozen
from edgeasync.regular_file import check_regular, read_regular
from edgeasync.training.graph_check import check_graph

MODEL_BYTES_MAX = 1 << 31
"""Maximum size of a protobuf message."""


class HubGraph(msgspec.Struct, frozen=True):
    """A hub's model: the training graph, its parameter layout, initial values and forward model.

    `frozen` is a checksum over those values of the forward model that are not trained.
    """

    graph: bytes
    spec: ParameterSpec
    initial: Vector
    forward: bytes | None
    frozen: Frozen | None = None
    warnings: tuple[str, ...] = ()
    """What may be wrong with the model file, one sentence each."""
    notes: tuple[str, ...] = ()
    """What the build chose or changed, such as the scores before a softmax, one sentence each."""
    in_chunks: bool = False
    """Whether the loss computes the scores in chunks, so that devices cannot measure metrics."""

    @property
    def remarks(self) -> list[str]:
        """The warnings and notes, for a log."""
        return [*self.warnings, *[f"note: {note}" for note in self.notes]]

    def with_flags(self) -> "HubGraph":
        """Return the same model with command-line flags in its warnings and notes."""
        warnings, notes = [tuple(map(with_flags, said)) for said in (self.warnings, self.notes)]
        return msgspec.structs.replace(self, warnings=warnings, notes=notes)


def load_graph(model: OnnxModel) -> HubGraph:
    """Read a model file, build its training graph, and screen the graph as devices will do.

    If the file is already a training graph, its initial values are read from a safetensors file
    with the same name in the same folder. Raises `ConfigError` if a file or package is missing, and
    `GraphError` if the model cannot be trained.
    """
    path = expanded(model.file)
    return build_graph(read_onnx_file(path), with_own_loss(model), str(path))


def describe_model(model: OnnxModel) -> ModelContents:
    """Read a model file that cannot be trained, and list its contents.

    Raises `ConfigError` or `GraphError` if the file cannot be read.
    """
    from edgeasync.autodiff.inspection import describe  # noqa: PLC0415 - devices do not install onnx

    return describe(read_onnx_file(expanded(model.file)), trains=False)


def with_own_loss(model: OnnxModel) -> OnnxModel:
    """Read the user-defined loss, if any, from its file into a copy of `model`.

    Raises `ConfigError` if the file cannot be read.
    """
    loss = model.loss
    if not isinstance(loss, OnnxLoss) or loss.file is None:
        return model
    return msgspec.structs.replace(model, loss=OnnxLoss(graph=_read(expanded(loss.file))))


def files_of(model: OnnxModel) -> list[Path]:
    """Return the files that `load_graph` may read: the model, its initial values, and the loss."""
    path = expanded(model.file)
    loss = [expanded(model.loss.file)] if isinstance(model.loss, OnnxLoss) and model.loss.file else []
    return [path, path.with_suffix(VALUES_SUFFIX), *loss]


def build_graph(content: bytes, model: OnnxModel, where: str) -> HubGraph:
    """Build the training graph of a model that was read from `where`.

    Raises the same errors as `load_graph`.
    """
    try:
        from edgeasync.autodiff import build, contract  # noqa: PLC0415 - devices do not install onnx
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise ConfigError("ONNX models need the package onnx: pip install 'edgeasync[hub]'") from error
    try:
        if contract.is_training_graph(content):
            _check_prebuilt(model)
            forward = None
            built = build.read_training_graph(
                content, _read_values(expanded(model.file).with_suffix(VALUES_SUFFIX))
            )
        else:
            built = build.build_training_graph(content, model)
            forward = built.forward or content
        check_graph(built.model, bytes_max=MODEL_BYTES_MAX)
        contract.check_rows(built.model)
    except GraphError as error:
        raise GraphError(f"{where}: {error}") from error
    frozen, graph = None, built.model
    if forward is not None:
        names = built.spec.names
        frozen = frozen_of(forward, names)
        source = source_in(content)
        if source is None:
            source = checksum_of(frozen if built.forward is None else frozen_of(content, names))
            forward = forward if built.forward is None else with_source(forward, source)
        graph = with_source(graph, source)
    return HubGraph(
        graph, built.spec, built.initial, forward, frozen, built.warnings, built.notes, built.in_chunks
    )


def keep_files(run: Path, graph: bytes, forward: bytes | None, names: Collection[str] = ()) -> None:
    """Store the model in the run's folder, so that the trained model can be exported later.

    `names` are the names of the trained arrays. When a run is resumed, the loss and the initial
    values of these arrays may have changed. Raises `ModelMismatchError` if the model differs in any
    other way from the one in the folder, and `StorageError` if the folder cannot be read or
    written.
    """
    for name, content in _checked_files(run, graph, forward, names).items():
        keep_file(run / name, content)


def check_forward(run: Path, forward: bytes | None, names: Collection[str]) -> None:
    """Raise what `keep_files` would raise for a forward model, without writing a file."""
    if forward is not None:
        _checked_files(run, b"", forward, names)


def _checked_files(run: Path, graph: bytes, forward: bytes | None, names: Collection[str]) -> dict[str, bytes]:
    """Return the files that the run's folder shall contain, by name."""
    origin, content = (TRAINING_FILE, graph) if forward is None else (FORWARD_FILE, forward)
    held = {FORWARD_FILE: held_forward(run, forward), TRAINING_FILE: held_file(run / TRAINING_FILE)}
    known, begun = held[origin], held[TRAINING_FILE]
    begun_otherwise = begun is not None and begun_with_forward(run, begun) != (forward is not None)
    if forward is not None and known is not None and _same_but_for_values(known, forward, names):
        forward = content = known
    if begun_otherwise or known not in (None, content):
        raise ModelMismatchError(
            f"{run / origin}: this run was started with another model, base or choice of parameters; use the "
            "same, or choose another run folder"
        )
    if forward is None:
        return {TRAINING_FILE: graph}
    return {FORWARD_FILE: forward, TRAINING_FILE: with_forward(graph, forward)}


def _same_but_for_values(one: bytes, other: bytes, names: Collection[str]) -> bool:
    """Return whether two forward models differ only in the initial values of these arrays."""
    if one == other or not names:
        return one == other
    try:
        import onnx  # noqa: PLC0415 - may be missing on a hub that resumes a run

        models = [onnx.load_model_from_string(content) for content in (one, other)]
    except Exception:  # noqa: BLE001 - protobuf raises errors of its own
        return False
    for model in models:
        for array in model.graph.initializer:
            if array.name in names:
                array.ClearField("raw_data")
                array.ClearField("float_data")
    return bool(models[0].SerializeToString(deterministic=True) == models[1].SerializeToString(deterministic=True))


def keep_file(path: Path, content: bytes) -> None:
    """Write a file to a run's folder, unless the file already has this content.

    Therefore, a full disk does not prevent a restart.
    """
    if held_file(path) != content:
        replace_file(path, content)


def read_onnx_file(path: Path) -> bytes:
    """Return the content of a model file, including values that are stored in files beside it.

    Raises `ConfigError` if the file cannot be read, and `GraphError` if another one cannot.
    """
    return insert_external_data(_read(path), path, bytes_max=MODEL_BYTES_MAX)


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; pass the path of an ONNX model") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; pass the path of an ONNX model") from error


def _read_values(path: Path) -> dict[str, Vector]:
    try:
        check_regular(path)
        return safetensors.numpy.load_file(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; a training graph needs this file with the initial values of its parameters"
        ) from None
    except (OSError, MemoryError, ValueError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({error}); build the graph again") from error


def _check_prebuilt(model: OnnxModel) -> None:
    """Raise `ConfigError` if settings are used that have no effect on a prebuilt training graph."""
    default = GraphSettings()
    for name in GraphSettings.__struct_fields__:
        if getattr(model, name) != getattr(default, name):
            raise ConfigError(
                f"{model.file}: already a training graph, so {name} has no effect; remove it, "
                "or pass the forward model"
            )
