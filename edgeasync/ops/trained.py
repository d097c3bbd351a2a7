"""Reads the trained model from a run's folder: the newest version, or the best by evaluation.

Checkpoints and `model.safetensors` may be a minute old, so the journal entries after them are
replayed. Nothing is written, and the hub may be running.
"""

import contextlib
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.core.hub.evaluation_tracker import is_better
from edgeasync.core.hub.events import Evaluated
from edgeasync.core.hub.lineage import Ancestry
from edgeasync.durable.run_events import Line
from edgeasync.durable.run_folder import BEST_FILE, FORWARD_FILE, MODEL_FILE, RunFolder
from edgeasync.durable.run_replay import RunReplay
from edgeasync.errors import ConfigError, StorageError
from edgeasync.graphs.model_file import VALUES_SUFFIX, read_model
from edgeasync.protocol.messages import ModelVersion


class TrainedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a run's model: its named arrays, and its creation time on the hub's clock.

    `evaluation` is the last evaluation of this or an earlier version, and names the evaluated
    version. `source` is the file or folder that was read. `remarks` are sentences for the user.
    `devices` is the status of every device after the newest version. If the model was read from a
    file that a hub saved, `made_s` is the time at which it was saved, and `devices` is empty.
    `updates` is the number of updates in the model, or None if unknown.
    """

    arrays: Mapping[str, npt.NDArray[np.float32]]
    source: Path
    lineage: str
    version: int
    made_s: float
    updates: int | None = None
    evaluation: Evaluated | None = None
    remarks: list[str] = []
    devices: list[dict[str, Any]] = []

    def metadata(self) -> dict[str, str]:
        """Return version, time and evaluation as text, for the metadata of an exported file."""
        made = datetime.fromtimestamp(self.made_s, UTC).isoformat(timespec="seconds")
        texts = {"lineage": self.lineage, "version": str(self.version), "time": made}
        if self.evaluation is not None:
            texts |= {"evaluated_version": str(self.evaluation.number), "loss": repr(self.evaluation.loss)}
            if self.evaluation.accuracy is not None:
                texts["accuracy"] = repr(self.evaluation.accuracy)
        return {f"edgeasync.{name}": text for name, text in texts.items()}


class _Record(msgspec.Struct):
    """The part of `hub.json` that is needed here."""

    class Hub(msgspec.Struct):
        durability: str = "journal"
        run: str = ""

    class Model(msgspec.Struct):
        local: list[str] = []
        file: str | None = None

    class Evaluation(msgspec.Struct):
        data: str | None = None

    hub: Hub
    model: Model = msgspec.field(default_factory=Model)
    evaluation: Evaluation = msgspec.field(default_factory=Evaluation)


def newest_model(run: Path, *, trust_code: bool = False) -> TrainedModel:
    """Return the newest version of a run. Raises `StorageError`.

    Without `trust_code`, no plugin is imported. For a run that uses plugins, the last checkpoint is
    then returned.
    """
    found = _newest(run, trust_code=trust_code)[0]
    folder = RunFolder(run)
    if found.source == run and folder.in_use and _record(folder).hub.durability != "journal":
        found.remarks.append("a hub without a journal is running here, so this is its last checkpoint")
    return found


def best_model(run: Path, *, trust_code: bool = False) -> TrainedModel:
    """Return the best version by evaluation. For `trust_code`, see `newest_model`.

    Raises `ConfigError` if no version was evaluated, and `StorageError` if the files are unreadable
    or no longer contain the best version.
    """
    kept = None
    if (run / BEST_FILE).exists():
        with contextlib.suppress(StorageError):  # the journal may still contain it
            kept = _read_file(run / BEST_FILE)
    try:
        newest, best, ancestry = _newest(run, trust_code=trust_code)
    except StorageError as error:
        if kept is None or kept.evaluation is None:
            raise
        kept.remarks.append(f"a better version may exist, but the run cannot be replayed: {error}")
        return kept
    if kept is not None and ancestry is not None and not ancestry.knows(ModelVersion(kept.lineage, kept.version)):
        kept = None  # it belongs to an abandoned branch
    if kept is not None:
        kept.remarks.extend(newest.remarks)
    if kept is not None and kept.evaluation is not None and (best is None or not is_better(best, kept.evaluation)):
        return msgspec.structs.replace(kept, devices=newest.devices)
    if best is None:
        raise ConfigError(
            f"{run}: no version has been evaluated yet; wait for the first evaluation ([evaluation] every), or "
            "run the command without --best (best= in Python)"
        )
    # Replay from the earliest checkpoint, because a killed hub may not have saved the best version.
    with closing(RunReplay(run, trust_code=trust_code)) as replay:
        found = _tell(replay, run, best.number)
    if found.version != best.number:
        raise StorageError(
            f"{run}: version {best.number} was the best, but neither {BEST_FILE} nor the journal contains it; "
            f"run the command without --best (best= in Python){''.join(f'; {remark}' for remark in found.remarks)}"
        )
    return msgspec.structs.replace(found, evaluation=best, devices=newest.devices)


def _newest(run: Path, *, trust_code: bool) -> tuple[TrainedModel, Evaluated | None, Ancestry | None]:
    """Return the newest version, the best evaluation, and the run's lineages."""
    if not any(RunFolder.open(run).checkpoints.manifests()):
        return _read_file(run / MODEL_FILE), None, None  # a hub would start from this file
    with closing(RunReplay(run, checkpoint="latest", trust_code=trust_code)) as replay:
        found, state = _tell(replay, run), replay.core.policy_engine.state
        return found, state.evaluations.best, state.ancestry


def _tell(replay: RunReplay, run: Path, wanted: int | None = None) -> TrainedModel:
    """Replay a run to its end, or to version `wanted`, and return the model there.

    The model's `made_s` is too early if the hub was down between the checkpoint and that version.
    """
    core = replay.core
    version, made_s = core.version, replay.beginning.hub_s

    def on_line(line: Line) -> bool:
        nonlocal version, made_s
        if core.version != version:
            version, made_s = core.version, line.hub_s
        return wanted is None or version < wanted

    if wanted is None or version < wanted:
        replay.tell(on_line)
    return TrainedModel(
        arrays=replay.spec.views(replay.snapshot.vector),
        source=run,
        lineage=core.lineage,
        version=version,
        made_s=replay.created_s + made_s - replay.beginning.hub_s,
        updates=core.updates_applied,
        evaluation=core.policy_engine.state.evaluations.last,
        remarks=list(replay.remarks),
        devices=replay.devices(),
    )


def _read_file(path: Path) -> TrainedModel:
    """Return a model from a file that a hub saved."""
    saved = read_model(path)
    return TrainedModel(
        arrays=saved.arrays,
        source=path,
        lineage=saved.lineage,
        version=saved.version,
        made_s=saved.saved_s,
        evaluation=saved.evaluation,
        remarks=[],
    )


def local_patterns(run: Path) -> list[str]:
    """Return the patterns of a run's local parameters from the hub's record, if it has one."""
    return _record(RunFolder(run)).model.local


def source_file(run: Path) -> Path | None:
    """Return the model file that a run was started with, or `None` if it is unknown or was in memory."""
    record = _record(RunFolder(run))
    file = record.model.file
    return None if file is None or file == str(Path(record.hub.run) / FORWARD_FILE) else Path(file)


def input_files(run: Path) -> list[Path]:
    """Return the files that a run was started with: the model, its initial values, and held-out data."""
    file, data = source_file(run), _record(RunFolder(run)).evaluation.data
    model = [] if file is None else [file, file.with_suffix(VALUES_SUFFIX)]
    return model if data is None else [*model, Path(data)]


def _record(folder: RunFolder) -> _Record:
    try:
        return folder.record(_Record)
    except (FileNotFoundError, StorageError):
        return _Record(_Record.Hub())
