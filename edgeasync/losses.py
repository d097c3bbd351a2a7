"""What training makes small: losses as objects, for `train(loss=...)` and `Hub(loss=...)`.

Each is a table of a settings file, too: `loss = { kind = "huber", delta = 0.5 }`.
`docs/reference/training_graph.md` defines them. Nothing here needs the `onnx` package.

>>> import numpy as np
>>> from edgeasync import Stop, losses, nn, train
>>> x = np.random.default_rng(0).normal(size=(200, 3))
>>> run = train(nn.Linear(3, 1), (x, x[:, :1]), loss=losses.Huber(delta=0.5), until=Stop(updates=20))
>>> run.updates >= 20
True
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edgeasync.config import Section, convert, expanded
from edgeasync.errors import ConfigError

__all__ = ["BinaryCrossEntropy", "CrossEntropy", "Huber", "MeanAbsoluteError", "MeanSquaredError", "OnnxLoss"]

_Share = Annotated[float, Meta(ge=0.0, lt=1.0)]
_Weight = Annotated[float, Meta(ge=0.0, le=1e6)]
_Label = Annotated[int, Meta(ge=0, le=2**24)]


class CrossEntropy(Section, frozen=True, tag_field="kind", tag="cross_entropy"):
    """Softmax cross-entropy of raw scores against class numbers.

    With `class_weights` it is the weighted mean, each example by the weight of its class. `label_smoothing`
    mixes that share of the uniform distribution into the labels (Szegedy et al. 2016, arXiv:1512.00567). What has
    the `ignored_label` counts for nothing; it need not be the number of a class.

    >>> from edgeasync import losses
    >>> losses.CrossEntropy(label_smoothing=0.1, class_weights=[1, 5]).class_weights
    (1.0, 5.0)
    """

    class_weights: tuple[_Weight, ...] | None = None
    """One weight for each class, for a weighted mean."""
    label_smoothing: _Share = 0.0
    """Share of the uniform distribution that the loss mixes into the labels."""
    ignored_label: _Label | None = None
    """Examples, or places, with this label count for nothing. It need not be the number of a class."""

    def __post_init__(self) -> None:
        weights = self.class_weights
        if weights is not None and type(weights) is not tuple:  # a list, or an array
            try:
                msgspec.structs.force_setattr(self, "class_weights", tuple(map(float, weights)))
            except (TypeError, ValueError):
                raise ConfigError(f"class_weights is {weights!r}; give a number for each class") from None


class MeanSquaredError(Section, frozen=True, tag_field="kind", tag="mse"):
    """The mean of squared differences over all values.

    >>> from edgeasync import losses
    >>> losses.find_loss("mse") == losses.MeanSquaredError()
    True
    """


class MeanAbsoluteError(Section, frozen=True, tag_field="kind", tag="l1"):
    """The mean of absolute differences over all values.

    >>> from edgeasync import losses
    >>> losses.find_loss("l1") == losses.MeanAbsoluteError()
    True
    """


class Huber(Section, frozen=True, tag_field="kind", tag="huber"):
    """Half the squared difference up to `delta`, linear beyond it (Huber 1964); the mean over all values.

    >>> from edgeasync import losses
    >>> losses.Huber(delta=0.5).delta
    0.5
    """

    delta: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0
    """Beyond this difference the loss is linear."""


class BinaryCrossEntropy(Section, frozen=True, tag_field="kind", tag="bce_with_logits"):
    """Cross-entropy of independent yes-or-no scores, before any sigmoid, against targets in [0, 1]; the mean.

    >>> from edgeasync import losses
    >>> losses.find_loss("bce_with_logits") == losses.BinaryCrossEntropy()
    True
    """


class OnnxLoss(Section, frozen=True, tag_field="kind", tag="onnx"):
    """A loss of your own: an ONNX graph with the inputs `prediction` and `target` and one number as its output.

    The number is the mean over the batch. Give the `file` of the graph, or the serialized `graph` itself.

    >>> from edgeasync import losses
    >>> losses.OnnxLoss(file="/models/loss.onnx").file
    '/models/loss.onnx'
    """

    file: str | None = None
    """Path of the graph. The hub reads it once; the record of the run holds the graph itself."""
    graph: bytes | None = None
    """The serialized graph in base64, as the record holds it."""

    def __post_init__(self) -> None:
        if (self.file is None) == (self.graph is None):
            raise ConfigError("a loss of kind onnx has a file or a graph: give one of the two")
        if self.file is not None:
            msgspec.structs.force_setattr(self, "file", str(expanded(self.file)))

    @property
    def content(self) -> bytes:
        """The serialized graph; raises `ConfigError` if the file was not read yet."""
        if self.graph is None:
            raise ConfigError(f"{self.file}: the file of the loss was not read; give the graph itself")
        return self.graph


NamedLoss = CrossEntropy | MeanSquaredError | MeanAbsoluteError | Huber | BinaryCrossEntropy
Loss = NamedLoss | OnnxLoss
LossName = Literal["cross_entropy", "mse", "l1", "huber", "bce_with_logits"]
LossSetting = LossName | Loss
"""A loss by its name alone, or with its parameters: an object here, a table with `kind` in a settings file."""

_LOSSES: dict[LossName, Loss] = {
    "cross_entropy": CrossEntropy(),
    "mse": MeanSquaredError(),
    "l1": MeanAbsoluteError(),
    "huber": Huber(),
    "bce_with_logits": BinaryCrossEntropy(),
}


def find_loss(setting: LossSetting) -> Loss:
    """Return the loss that a setting means.

    >>> from edgeasync import losses
    >>> losses.find_loss("huber").delta
    1.0
    """
    return _LOSSES[setting] if isinstance(setting, str) else setting


def kind_of(setting: LossSetting) -> str:
    """Return the name of the kind of a loss.

    >>> from edgeasync import losses
    >>> losses.kind_of(losses.Huber(delta=0.5))
    'huber'
    """
    return str(find_loss(setting).__struct_config__.tag)


def check_loss(loss: object, where: str) -> LossSetting:
    """Return what was given as a loss: an object of this module, a name, or a table; raises `ConfigError`."""
    try:
        table = msgspec.to_builtins(loss, enc_hook=float)  # which takes the numbers of numpy
    except (TypeError, ValueError):
        raise ConfigError(
            f"{where}: loss is {loss!r}; give a name such as 'mse', or an object of edgeasync.losses"
        ) from None
    return convert({"loss": table}, _Given, where=where).loss


class _Given(Section, frozen=True):
    loss: LossSetting
