"""The model that a run has trained, from its folder alone: the newest version, or the best by evaluation.

A checkpoint may be a minute old, and so may `model.safetensors`: the journal is replayed from there on. Nothing is
written, and a hub may be at work in the folder.
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
from edgeasync.durable.run_folder import BEST_FILE, MODEL_FILE, RunFolder
from edgeasync.durable.run_replay import RunReplay
from edgeasync.errors import ConfigError, StorageError
from edgeasync.graphs.model_file import read_model
from edgeasync.protocol.messages import ModelVersion


class TrainedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a run's model: its named arrays, and when it was made, by the wall clock of its hub.

    Of a model that was read from a file of its own, the time is when a hub saved it. `updates` are part of it, as
    far as that is known.
    `evaluation` is the last one up to this version; its number tells of which. `source` is the file or folder that
    was read, and `remarks` are sentences for a person. `devices` is what the status says of every device after the
    newest version; a model that was read from a file of its own has none.
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
        """Return what is known of the model as texts, for the metadata of an exported file."""
        made = datetime.fromtimestamp(self.made_s, UTC).isoformat(timespec="seconds")
        texts = {"lineage": self.lineage, "version": str(self.version), "time": made}
        if self.evaluation is not None:
            texts |= {"evaluated_version": str(self.evaluation.number), "loss": repr(self.evaluation.loss)}
            if self.evaluation.accuracy is not None:
                texts["accuracy"] = repr(self.evaluation.accuracy)
        return {f"edgeasync.{name}": text for name, text in texts.items()}


class _Record(msgspec.Struct):
    """What matters here of `hub.json`."""

    class Hub(msgspec.Struct):
        durability: str = "journal"

    class Model(msgspec.Struct):
        local: list[str] = []

    hub: Hub
    model: Model = msgspec.field(default_factory=Model)


def newest_model(run: Path, *, trust_code: bool = False) -> TrainedModel:
    """Return the newest version that the folder of a run leads to; raises `StorageError`.

    Without `trust_code` no plugin is imported: of a run under plugins it is the version of the last checkpoint.
    """
    found = _newest(run, trust_code=trust_code)[0]
    folder = RunFolder(run)
    if found.source == run and folder.in_use and _record(folder).hub.durability != "journal":
        found.remarks.append("a hub is at work here that keeps no journal: this is of its last checkpoint")
    return found


def best_model(run: Path, *, trust_code: bool = False) -> TrainedModel:
    """Return the best version by evaluation; `trust_code` is as for `newest_model`.

    Raises `ConfigError` if no version was evaluated, and `StorageError` if the files cannot be read or no longer
    have it.
    """
    kept = None
    if (run / BEST_FILE).exists():
        with contextlib.suppress(StorageError):  # the journal may lead there all the same
            kept = _read_file(run / BEST_FILE)
    try:
        newest, best, ancestry = _newest(run, trust_code=trust_code)
    except StorageError as error:
        if kept is None or kept.evaluation is None:
            raise
        kept.remarks.append(f"a better version may have come later, but there is no replaying the run: {error}")
        return kept
    if kept is not None and ancestry is not None and not ancestry.knows(ModelVersion(kept.lineage, kept.version)):
        kept = None  # of a branch that was left
    if kept is not None:
        kept.remarks.extend(newest.remarks)
    if kept is not None and kept.evaluation is not None and (best is None or not is_better(best, kept.evaluation)):
        return msgspec.structs.replace(kept, devices=newest.devices)
    if best is None:
        raise ConfigError(
            f"{run}: no version was evaluated yet; wait for one ([evaluation] every), or leave out best (--best)"
        )
    # From as early as the journal leads on: a hub that was killed had not written the best.
    with closing(RunReplay(run, trust_code=trust_code)) as replay:
        found = _tell(replay, run, best.number)
    if found.version != best.number:
        raise StorageError(
            f"{run}: version {best.number} was the best, but it is not in {BEST_FILE}, and the journal does not "
            f"lead there any more; leave out best (--best){''.join(f'; {remark}' for remark in found.remarks)}"
        )
    return msgspec.structs.replace(found, evaluation=best, devices=newest.devices)


def _newest(run: Path, *, trust_code: bool) -> tuple[TrainedModel, Evaluated | None, Ancestry | None]:
    """Return the newest version, the best evaluation, and whose versions the run may call its own."""
    if not any(RunFolder.open(run).checkpoints.manifests()):
        return _read_file(run / MODEL_FILE), None, None  # a hub would begin with it
    with closing(RunReplay(run, checkpoint="latest", trust_code=trust_code)) as replay:
        found, state = _tell(replay, run), replay.core.policy_engine.state
        return found, state.evaluations.best, state.ancestry


def _tell(replay: RunReplay, run: Path, wanted: int | None = None) -> TrainedModel:
    """Replay a story to its end, or to version `wanted`; return the model there.

    The time is right but for a hub that was away between the checkpoint and that version.
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
    """Return a model that a hub has written by itself."""
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
    """Return which arrays of a run each device keeps to itself, as far as the hub's record tells."""
    return _record(RunFolder(run)).model.local


def _record(folder: RunFolder) -> _Record:
    try:
        return folder.record(_Record)
    except (FileNotFoundError, StorageError):
        return _Record(_Record.Hub())
