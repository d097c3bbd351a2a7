"""A training run: its model, its devices and its history."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeasync.config import expanded
from edgeasync.durable.files import check_out, replace_file
from edgeasync.durable.run_events import Line, RunEvent
from edgeasync.durable.run_folder import RunFolder
from edgeasync.durable.run_replay import RunReplay
from edgeasync.errors import ConfigError
from edgeasync.graphs.export import ONNX_SUFFIX, check_export_file, refuse_onnx, write_arrays
from edgeasync.graphs.model_file import VALUES_SUFFIX
from edgeasync.graphs.peft import ADAPTERS_FILE, write_peft
from edgeasync.graphs.source import held_forward
from edgeasync.ops.trained import best_model, input_files, newest_model
from edgeasync.sdk.events import Evaluation, Event
from edgeasync.sdk.history import History
from edgeasync.sdk.observer import event_of
from edgeasync.sdk.plan import as_path

LOG = logging.getLogger("edgeasync.run")


class Run:
    """A training run, returned by `train` or read from its folder by `Run.open`.

    >>> import numpy as np
    >>> from edgeasync import Run, Stop, nn, train
    >>> data = np.eye(4), [0, 1, 0, 1]
    >>> run = train(nn.Linear(4, 2), data, run="runs/eye", until=Stop(updates=20))
    >>> Run.open("runs/eye").arrays["0.weight"].shape
    (2, 4)
    >>> len(run.history["loss"]) >= 20
    True
    """

    def __init__(
        self,
        path: Path,
        arrays: dict[str, npt.NDArray[np.float32]],
        version: int,
        *,
        restore: Callable[[dict[str, npt.NDArray[np.float32]]], Any],
        loss: float | None = None,
        accuracy: float | None = None,
        reason: str = "",
        updates: int | None = None,
        devices: Sequence[dict[str, Any]] = (),
        events: Sequence[Event] | None = None,
    ) -> None:
        self.path = path
        """The folder of the run; a temporary folder is deleted when this object is deleted."""
        self.arrays = arrays
        """The newest model: float32 arrays by name."""
        self.version = version
        """The version number of the model."""
        self.loss = loss
        """The loss of the last evaluation, or `None`."""
        self.accuracy = accuracy
        """The accuracy of the last evaluation, from 0 to 1, or `None`."""
        self.reason = reason
        """The reason why training ended; empty for a run opened from its folder."""
        self.updates = updates
        """The number of updates applied to the model, or `None` if unknown."""
        self.devices = list(devices)
        """The status of every device when training ended (docs/reference/json.md)."""
        self._events = None if events is None else list(events)
        self._restore = restore

    def __repr__(self) -> str:
        found = [f"version {self.version}"]
        if self.updates is not None:
            found.append(f"{self.updates} updates")
        if self.loss is not None:
            found.append(f"loss {self.loss:.4g}")
        if self.accuracy is not None:
            found.append(f"accuracy {self.accuracy:.2%}")
        return f"<Run {self.path}: {', '.join(found)}>"

    @property
    def history(self) -> History:
        """The run's updates and evaluations; read from the folder at each access."""
        return History.read(self.path)

    @property
    def events(self) -> list[Event]:
        """The events of the run except updates and versions, as in `edgeasync.callbacks`.

        For a run opened from its folder, the list contains the joins, departures and alerts in the
        journal, and all evaluations. These events are read at the first access.
        """
        if self._events is None:
            self._events = _read_events(self.path)
        return self._events

    @property
    def model(self) -> Any:
        """The trained model, converted to the type of model that the user passed.

        ONNX models and layers are returned as an `onnx.ModelProto` for inference. Your own models
        and named arrays are returned as named arrays.
        """
        return self._restore(self.arrays)

    def export(self, path: str | Path, *, peft: bool = False) -> Path:
        """Write the trained model to `path` (`.onnx`, `.safetensors` or `.npz`); return the path.

        An ONNX file is for inference. The other formats store the named arrays of any model. With
        `peft`, write LoRA adapters for Hugging Face's PEFT, to the folder `path`.

        Raises `ConfigError` for another suffix, for `.onnx` if the model is not an ONNX model, for
        `peft` if the run has no adapters, and for a `path` that must not be overwritten: a file of
        the run, one that it was started with, or a file of examples. Raises `GraphError` if names in
        the model are not those of a torch module, and `StorageError` if the file cannot be written.
        """
        path = expanded(path)
        check_out("export", path / ADAPTERS_FILE if peft else path, *input_files(self.path), run=self.path)
        if peft:
            forward = held_forward(self.path)
            if forward is None:
                raise ConfigError(
                    f"export {path}: peft=True needs a run whose hub trained LoRA adapters of an ONNX model, and "
                    f"{self.path} contains no such model; for the arrays alone use {path.stem + VALUES_SUFFIX}"
                )
            write_peft(path, forward, self.arrays)
            return path
        check_export_file("export", path)
        if path.suffix != ONNX_SUFFIX:
            write_arrays(path, self.arrays, {"edgeasync.version": str(self.version)})
            return path
        model = self.model
        if not hasattr(model, "SerializeToString"):
            raise refuse_onnx("export", path)
        replace_file(path, model.SerializeToString(), private=False)
        return path

    @classmethod
    def open(cls, path: str | Path, *, best: bool = False, trust_code: bool = False) -> "Run":
        """Read the newest version of a run from its folder, even while the run continues.

        With `best`, read the version with the best evaluation instead. Code named in the folder is
        not imported. If the run uses plugins, `open` therefore reads the version of the last
        checkpoint, and logs a warning. With `trust_code`, the plugins are imported, and run with
        your rights.

        Raises `StorageError` if the folder does not contain a run.
        """
        folder = as_path(path, "the run")
        found = (best_model if best else newest_model)(folder, trust_code=trust_code)
        for remark in found.remarks:
            LOG.warning("%s: %s", folder, remark)
        evaluation = found.evaluation
        return cls(
            folder,
            {name: np.array(array) for name, array in found.arrays.items()},
            found.version,
            restore=lambda arrays: _restored(folder, arrays),
            loss=None if evaluation is None else evaluation.loss,
            accuracy=None if evaluation is None else evaluation.accuracy,
            updates=found.updates,
            devices=found.devices,
        )


def _read_events(folder: Path) -> list[Event]:
    """Read the events of a run from its folder."""
    found: list[Event] = [
        Evaluation(time_s=row.time_s, version=row.version, loss=row.loss, accuracy=row.accuracy)
        for row in RunFolder(folder).history().evaluations
    ]
    if not RunFolder(folder).has_checkpoint:
        return found

    def note(line: Line) -> bool:
        if isinstance(line, RunEvent):
            event = event_of(line.event, line.device, line.detail, line.hub_s, line.figures)
            found.extend(() if event is None else (event,))
        return True

    for replay in RunReplay.of_parts(folder):
        replay.tell(note)
    return sorted(found, key=lambda event: event.time_s)


def _restored(folder: Path, arrays: dict[str, npt.NDArray[np.float32]]) -> Any:
    """Return the run's ONNX model with these arrays, or the arrays if the run has no ONNX model."""
    forward = held_forward(folder)
    if forward is None:
        return arrays
    import onnx  # noqa: PLC0415 - not installed on devices

    from edgeasync.autodiff.export import export_model  # noqa: PLC0415

    return onnx.load_model_from_string(export_model(forward, arrays))
