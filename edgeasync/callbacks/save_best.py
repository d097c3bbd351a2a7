"""`SaveBest`: writes the best model so far to a file."""

from pathlib import Path
from typing import Any

from edgeasync.config import expanded
from edgeasync.durable.files import replace_file
from edgeasync.errors import ConfigError
from edgeasync.graphs.export import NPZ_SUFFIX, ONNX_SUFFIX, check_export_file, refuse_onnx, write_arrays
from edgeasync.sdk.events import Best


class SaveBest:
    """Writes the model to `path` whenever an evaluation is the best so far.

    The suffix of `path` selects the format: `.onnx` for inference, or `.npz` or `.safetensors` for
    named arrays. If `path` has no suffix, `.onnx` is appended for ONNX models and `.npz` for other
    models; `saved` is the resulting path. Any other suffix raises `ConfigError`. Pass this callback
    to `train` or `Hub`; an `Agent` does not evaluate the run's model.

    Without held-out data (`evaluate=`), versions are compared by the losses that the devices
    report. A version's loss is then the value that most devices reach, and the version with the
    lowest loss is the best.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from edgeasync import Stop, train
    >>> from edgeasync.callbacks import SaveBest
    >>> from edgeasync.training.numpy_models import SoftmaxModel
    >>> data = np.eye(3), np.arange(3)
    >>> best = SaveBest(Path(tempfile.mkdtemp()) / "best")
    >>> often = {"evaluation": {"every": "5 updates"}}
    >>> model, until = SoftmaxModel(inputs=3, classes=3), Stop(updates=20)
    >>> _ = train(model, data, workers=1, until=until, evaluate=data, callbacks=[best], settings=often)
    >>> best.saved.name, sorted(np.load(best.saved))
    ('best.npz', ['layer0.bias', 'layer0.weight'])
    """

    def __init__(self, path: str | Path) -> None:
        self._path = expanded(path)
        if self._path.suffix:
            check_export_file("SaveBest", self._path)
        self.saved: Path | None = None
        """The path of the file that was written last."""

    def on_best(self, event: Best) -> None:
        """Write the model to `path`.

        Raises `ConfigError` if a model of this kind cannot be saved with the suffix of `path`, and
        `StorageError` if the file cannot be written.
        """
        model = _onnx(event) if self._path.suffix in ("", ONNX_SUFFIX) else None
        if model is None and self._path.suffix == ONNX_SUFFIX:
            raise refuse_onnx("SaveBest", self._path)
        path = self._path
        if not path.suffix:
            path = path.with_suffix(NPZ_SUFFIX if model is None else ONNX_SUFFIX)
        path.parent.mkdir(parents=True, exist_ok=True)
        if model is None:
            write_arrays(path, event.arrays, {"edgeasync.version": str(event.version)})
        else:
            replace_file(path, model.SerializeToString(), private=False)
        self.saved = path


def _onnx(event: Best) -> Any:
    """Return the model if it is an ONNX model, otherwise `None`."""
    try:
        model = event.model
    except ConfigError:  # a training graph, which cannot be exported
        return None
    return model if hasattr(model, "SerializeToString") else None
