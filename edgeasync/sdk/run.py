"""A run: what was trained, by whom, and how it went."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeasync.config import expanded
from edgeasync.durable.files import replace_file
from edgeasync.durable.run_events import Line, RunEvent
from edgeasync.durable.run_folder import FORWARD_FILE, RunFolder
from edgeasync.durable.run_replay import RunReplay
from edgeasync.graphs.export import ONNX_SUFFIX, check_suffix, refuse_onnx, write_arrays
from edgeasync.graphs.graph_model import held_file
from edgeasync.ops.trained import best_model, newest_model
from edgeasync.sdk.events import Evaluation, Event
from edgeasync.sdk.history import History
from edgeasync.sdk.observer import event_of
from edgeasync.sdk.plan import as_path

LOG = logging.getLogger("edgeasync.run")


class Run:
    """A run of training, as `train` returns it or as its folder holds it (`Run.open`).

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
        """The folder of the run; without one of your own it lives as long as this object."""
        self.arrays = arrays
        """The newest version of the model: float32 arrays by name."""
        self.version = version
        """Its number."""
        self.loss = loss
        """The loss of the last evaluation, `None` without one."""
        self.accuracy = accuracy
        """The accuracy of the last evaluation, from 0 to 1; `None` without one."""
        self.reason = reason
        """Why training ended; empty for a folder that was opened."""
        self.updates = updates
        """How many updates are part of the model; `None` if that is not known."""
        self.devices = list(devices)
        """What the status says of every device when training ended (docs/reference/json.md)."""
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
        """One row for each update, and the evaluations, as numpy arrays; read from the folder at each look."""
        return History.read(self.path)

    @property
    def events(self) -> list[Event]:
        """What happened, but for single updates and versions: events of `edgeasync.callbacks`.

        Of a folder that was opened: who came and left and what was odd as far as the journal tells, and all
        evaluations; read at the first look.
        """
        if self._events is None:
            self._events = _read_events(self.path)
        return self._events

    @property
    def model(self) -> Any:
        """The trained model in the kind that was given.

        ONNX and layers come back as an `onnx.ModelProto` for inference. Models of your own, and named arrays, come
        back as named arrays.
        """
        return self._restore(self.arrays)

    def export(self, path: str | Path) -> Path:
        """Write the trained model, and return its path: by the ending of that, `.onnx`, `.safetensors` or `.npz`.

        ONNX is for inference, the others have the named arrays, of any model. Raises `ConfigError` for another
        ending, and for ONNX of a model that is not; `StorageError` if it cannot be written.
        """
        path = expanded(path)
        check_suffix("export", path)
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
        """Read the run in a folder, also one at work: its newest version or, with `best`, the best by evaluation.

        Nothing that the folder names is imported. So if plugins decided, the newest version is that of the last
        checkpoint, and a warning is logged. With `trust_code` the plugins are imported, and run with your rights.

        Raises `StorageError` if the folder does not hold a run.
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
    """Return what happened in a run, as far as its folder tells."""
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
    """Return the model that a run's folder describes, or its arrays if Python code alone describes it."""
    forward = held_file(folder / FORWARD_FILE)
    if forward is None:
        return arrays
    import onnx  # noqa: PLC0415 - a device has none

    from edgeasync.autodiff.export import export_model  # noqa: PLC0415

    return onnx.load_model_from_string(export_model(forward, arrays))
