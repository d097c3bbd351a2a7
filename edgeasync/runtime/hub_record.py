"""Read and write `hub.json` in a run's folder: the settings of the last start."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from edgeasync.config import ByteCount, FilePath, convert, to_table
from edgeasync.core.hub.settings import CheckpointSettings
from edgeasync.durable.run_folder import FORWARD_FILE, RECORD_FILE, RunFolder
from edgeasync.errors import StorageError
from edgeasync.graphs.onnx_model import BUILD_S, OnnxModel
from edgeasync.graphs.source import held_forward
from edgeasync.graphs.user_code import CustomModel
from edgeasync.host.host_info import half_of_memory_bytes
from edgeasync.plugins import Trust
from edgeasync.runtime.hub_settings import HubSettings

RECORD_FORMAT = 1
"""The value of the key `format`. Other values are rejected. Increase it when a key changes."""


def record_of(settings: HubSettings) -> bytes:
    """Return the settings as JSON, from which the same hub can be started in any working directory.

    The record does not contain `checkpoint.recovery`, which applies to a single start only.
    """
    latest, run = (
        CheckpointSettings().recovery,
        FilePath.parse(settings.hub.run),
    )  # makes the default path absolute
    noted = replace(
        settings,
        hub=replace(settings.hub, run=run),
        checkpoint=replace(settings.checkpoint, recovery=latest),
    )
    table = {"format": RECORD_FORMAT} | to_table(noted)
    return msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n"


def read_record(run: Path, *, trust_code: bool = False) -> HubSettings:
    """Return the settings of a run's last start, to resume it in its folder.

    If `trust_code` is false, the settings may name only installed plugins, and cannot raise the
    limits on building a model.

    Raises `StorageError` if the run or its record is missing, or if the record's format is
    different. Raises `ConfigError` if the settings are invalid, and `PluginError` if they name code
    that must not be imported.
    """
    folder, path = RunFolder.open(run), run / RECORD_FILE
    begin = f"start the run with a settings file: edgeasync hub CONFIG --run {run}"
    if not folder.has_checkpoint:
        raise StorageError(f"{run}: no checkpoint to resume from; {begin}")
    try:
        table = folder.record(dict[str, Any], begin)
    except FileNotFoundError:
        raise StorageError(
            f"{path}: no such file, so the run's settings are unknown; if a Python program started the run, start "
            f"that program again; otherwise {begin}"
        ) from None
    written = table.pop("format", None)
    if not isinstance(written, int):
        raise StorageError(
            f"{path}: missing key 'format', so the file is damaged or not written by edgeasync; {begin}"
        )
    if written != RECORD_FORMAT:
        raise StorageError(
            f"{path}: has format {written}, but this edgeasync reads format {RECORD_FORMAT}; use the version of "
            f"edgeasync that wrote it, or {begin}"
        )
    trust = Trust(installed=True, code=trust_code)
    settings = convert(table, HubSettings, where=str(path), find=trust.find_policy)
    model = settings.model
    if isinstance(model, CustomModel):
        trust.check_code(model.factory, f"{path}: [model] factory")
    if isinstance(model, OnnxModel) and not trust_code:
        model = _within_limits(model)
    return replace(settings, model=model, hub=replace(settings.hub, run=FilePath.parse(run)))


def own_model(model: OnnxModel, run: Path) -> OnnxModel:
    """Return the settings that load the forward model in a run's folder, if the folder contains one.

    The file that the run was started with may be gone. Raises `StorageError` if the run's is
    damaged.
    """
    forward = run / FORWARD_FILE
    if not forward.exists():
        return model
    held_forward(run)
    return replace(model, file=FilePath.parse(forward))


def _within_limits(model: OnnxModel) -> OnnxModel:
    """Return the model settings. Limits on the build that exceed the defaults are reduced to them."""
    nbytes = model.build_memory_bytes_max
    if nbytes is not None:
        nbytes = ByteCount(min(nbytes, half_of_memory_bytes() or nbytes))
    return replace(model, build_s_max=min(model.build_s_max, BUILD_S), build_memory_bytes_max=nbytes)
