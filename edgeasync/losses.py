"""Losses as objects, for `train(loss=...)` and `Hub(loss=...)`.

Each can also be a table in a settings file: `loss = { kind = "huber", delta = 0.5 }`.
`docs/reference/training_graph.md` defines them. This module does not import the `onnx` package.

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
    """Softmax cross-entropy of raw scores against labels.

    With `class_weights`, the loss is a weighted mean: each example has the weight of its class.
    Labels are class numbers. `label_smoothing` is the weight of the uniform distribution that is
    mixed into the labels (Szegedy et al. 2016, arXiv:1512.00567). Examples with the label
    `ignored_label` do not contribute to the loss. This label need not be a class number.

    >>> from edgeasync import losses
    >>> losses.CrossEntropy(label_smoothing=0.1, class_weights=[1, 5]).class_weights
    (1.0, 5.0)
    """

    class_weights: tuple[_Weight, ...] | None = None
    """The weight of each class. The loss is then a weighted mean."""
    label_smoothing: _Share = 0.0
    """Weight of the uniform distribution that is mixed into the labels."""
    ignored_label: _Label | None = None
    """Label of examples or positions that the loss ignores. It need not be a class number."""

    def __post_init__(self) -> None:
        weights = self.class_weights
        if weights is not None and type(weights) is not tuple:  # a list, or an array
            try:
                msgspec.structs.force_setattr(self, "class_weights", tuple(map(float, weights)))
            except (TypeError, ValueError):
                raise ConfigError(f"class_weights is {weights!r}; pass a number for each class") from None


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
    """The mean Huber loss: half the squared difference up to `delta`, linear above it (Huber 1964).

    >>> from edgeasync import losses
    >>> losses.Huber(delta=0.5).delta
    0.5
    """

    delta: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0
    """Absolute difference above which the loss is linear."""


class BinaryCrossEntropy(Section, frozen=True, tag_field="kind", tag="bce_with_logits"):
    """Mean binary cross-entropy of raw scores, before a sigmoid. Targets are in [0, 1].

    >>> from edgeasync import losses
    >>> losses.find_loss("bce_with_logits") == losses.BinaryCrossEntropy()
    True
    """


class OnnxLoss(Section, frozen=True, tag_field="kind", tag="onnx"):
    """A user-defined loss: an ONNX graph with inputs `prediction` and `target` and a scalar output.

    The scalar is the mean over the batch. Pass the `file` of the graph, or the serialized `graph`
    itself.

    >>> from edgeasync import losses
    >>> losses.OnnxLoss(file="/models/loss.onnx").file
    '/models/loss.onnx'
    """

    file: str | None = None
    """Path of the graph. The hub reads it once, and stores the graph itself in the run's record."""
    graph: bytes | None = None
    """The serialized graph in base64, as stored in the run's record."""

    def __post_init__(self) -> None:
        if (self.file is None) == (self.graph is None):
            raise ConfigError("a loss of kind onnx needs either file or graph; set one of the two")
        if self.file is not None:
            msgspec.structs.force_setattr(self, "file", str(expanded(self.file)))

    @property
    def content(self) -> bytes:
        """The serialized graph. Raises `ConfigError` if `file` has not been read yet."""
        if self.graph is None:
            raise ConfigError(f"{self.file}: the file of the loss was not read; pass the graph itself")
        return self.graph


NamedLoss = CrossEntropy | MeanSquaredError | MeanAbsoluteError | Huber | BinaryCrossEntropy
Loss = NamedLoss | OnnxLoss
LossName = Literal["cross_entropy", "mse", "l1", "huber", "bce_with_logits"]
LossSetting = LossName | Loss
"""A loss: a name, an object of this module or, in a settings file, a table with `kind`."""

_LOSSES: dict[LossName, Loss] = {
    "cross_entropy": CrossEntropy(),
    "mse": MeanSquaredError(),
    "l1": MeanAbsoluteError(),
    "huber": Huber(),
    "bce_with_logits": BinaryCrossEntropy(),
}


def find_loss(setting: LossSetting) -> Loss:
    """Return the loss for a setting.

    >>> from edgeasync import losses
    >>> losses.find_loss("huber").delta
    1.0
    """
    return _LOSSES[setting] if isinstance(setting, str) else setting


def kind_of(setting: LossSetting) -> str:
    """Return the name of a loss's kind.

    >>> from edgeasync import losses
    >>> losses.kind_of(losses.Huber(delta=0.5))
    'huber'
    """
    return str(find_loss(setting).__struct_config__.tag)


def check_loss(loss: object, where: str) -> LossSetting:
    """Validate a loss, which is an object of this module, a name or a table.

    Raises `ConfigError`.
    """
    try:
        table = msgspec.to_builtins(loss, enc_hook=float)  # converts numpy's numbers
    except (TypeError, ValueError):
        raise ConfigError(
            f"{where}: loss is {loss!r}; pass a name such as 'mse', or an object of edgeasync.losses"
        ) from None
    return convert({"loss": table}, _Given, where=where).loss


class _Given(Section, frozen=True):
    loss: LossSetting
