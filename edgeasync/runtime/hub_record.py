"""`hub.json` in the folder of a run: the settings of its last start, by which the run is resumed."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from edgeasync.config import ByteCount, FilePath, convert, to_table
from edgeasync.core.hub.settings import CheckpointSettings
from edgeasync.durable.run_folder import FORWARD_FILE, RECORD_FILE, RunFolder
from edgeasync.errors import StorageError
from edgeasync.graphs.onnx_model import BUILD_S, OnnxModel
from edgeasync.graphs.user_code import CustomModel
from edgeasync.host.host_info import half_of_memory_bytes
from edgeasync.plugins import Trust
from edgeasync.runtime.hub_settings import HubSettings

RECORD_FORMAT = 1
"""Where it stands under `format`: the only format that is read. Increase it when a key changes."""


def record_of(settings: HubSettings) -> bytes:
    """Return the settings as JSON, to begin the same hub from any folder.

    To resume from another checkpoint than the latest is done once, and not noted.
    """
    latest, run = CheckpointSettings().recovery, FilePath.parse(settings.hub.run)  # which the default is not yet
    noted = replace(
        settings,
        hub=replace(settings.hub, run=run),
        checkpoint=replace(settings.checkpoint, recovery=latest),
    )
    table = {"format": RECORD_FORMAT} | to_table(noted)
    return msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n"


def read_record(run: Path, *, trust_code: bool = False) -> HubSettings:
    """Return the settings of the last start of the run in a folder, to resume it there.

    Without `trust_code` they name no code but installed plugins, and raise no limit of building a model.

    Raises `StorageError` if there is nothing to resume, or no settings, or if another version wrote them;
    `ConfigError` if they are not settings; `PluginError` if they name code that may not be imported.
    """
    folder, path = RunFolder.open(run), run / RECORD_FILE
    begin = f"begin by a settings file: edgeasync hub CONFIG --run {run}"
    if not folder.has_checkpoint:
        raise StorageError(f"{run}: has no checkpoint to resume from; {begin}")
    try:
        table = folder.record(dict[str, Any], begin)
    except FileNotFoundError:
        raise StorageError(
            f"{path}: no such file, so its settings are not known; if a Python program began the run, start that "
            f"again; else {begin}"
        ) from None
    written = table.pop("format", None)
    if not isinstance(written, int):
        raise StorageError(f"{path}: has no format, so it is damaged, or not a run's of edgeasync; {begin}")
    if written != RECORD_FORMAT:
        raise StorageError(
            f"{path}: is of format {written}, and this edgeasync reads format {RECORD_FORMAT}; "
            f"start the version of edgeasync that wrote it; or {begin}"
        )
    trust = Trust(installed=True, code=trust_code)
    settings = convert(table, HubSettings, where=str(path), find=trust.find_policy)
    model, forward = settings.model, run / FORWARD_FILE
    if isinstance(model, CustomModel):
        trust.check_code(model.factory, f"{path}: [model] factory")
    if isinstance(model, OnnxModel) and not trust_code:
        model = _within_limits(model)
    if isinstance(model, OnnxModel) and forward.exists():
        model = replace(model, file=FilePath.parse(forward))  # wherever the folder has come from
    return replace(settings, model=model, hub=replace(settings.hub, run=FilePath.parse(run)))


def _within_limits(model: OnnxModel) -> OnnxModel:
    """Return a model without limits of its building that are over the default ones."""
    nbytes = model.build_memory_bytes_max
    if nbytes is not None:
        nbytes = ByteCount(min(nbytes, half_of_memory_bytes() or nbytes))
    return replace(model, build_s_max=min(model.build_s_max, BUILD_S), build_memory_bytes_max=nbytes)
