"""What a training graph is built for: the loss, the parameters it trains, and the output it reads.

Nothing here needs the `onnx` package, so that settings can be checked anywhere.
"""

from typing import Annotated, Literal

from msgspec import Meta

from edgeasync.config import Section

_Share = Annotated[float, Meta(ge=0.0, lt=1.0)]
_Weight = Annotated[float, Meta(ge=0.0, le=1e6)]


class CrossEntropy(Section, frozen=True, tag_field="kind", tag="cross_entropy"):
    """Softmax cross-entropy of raw scores against class numbers.

    With `class_weights` it is the weighted mean, each example by the weight of its class. `label_smoothing`
    mixes that share of the uniform distribution into the labels (Szegedy et al. 2016, arXiv:1512.00567).
    """

    class_weights: tuple[_Weight, ...] | None = None
    label_smoothing: _Share = 0.0


class MeanSquaredError(Section, frozen=True, tag_field="kind", tag="mse"):
    """The mean of squared differences over all values."""


class MeanAbsoluteError(Section, frozen=True, tag_field="kind", tag="l1"):
    """The mean of absolute differences over all values."""


class Huber(Section, frozen=True, tag_field="kind", tag="huber"):
    """Half the squared difference up to `delta`, linear beyond it (Huber 1964); the mean over all values."""

    delta: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0


class BinaryCrossEntropy(Section, frozen=True, tag_field="kind", tag="bce_with_logits"):
    """Cross-entropy of independent yes-or-no scores, before any sigmoid, against targets in [0, 1]; the mean."""


Loss = CrossEntropy | MeanSquaredError | MeanAbsoluteError | Huber | BinaryCrossEntropy
LossName = Literal["cross_entropy", "mse", "l1", "huber", "bce_with_logits"]
LossSetting = LossName | Loss
"""A loss by its name alone, or as a table with `kind` and its parameters."""

_LOSSES: dict[LossName, Loss] = {
    "cross_entropy": CrossEntropy(),
    "mse": MeanSquaredError(),
    "l1": MeanAbsoluteError(),
    "huber": Huber(),
    "bce_with_logits": BinaryCrossEntropy(),
}


def find_loss(setting: LossSetting) -> Loss:
    """Return the loss that a setting means."""
    return _LOSSES[setting] if isinstance(setting, str) else setting


class GraphSettings(Section, frozen=True):
    """How a forward model becomes a training graph.

    `train` and `freeze` are shell patterns over parameter names: trained is what a pattern of `train` matches
    and none of `freeze`. `output` names the tensor that the loss reads; without it the model must have one
    output. `target = "input"` makes an autoencoder: every example is its own target.
    """

    loss: LossSetting = "cross_entropy"
    train: Annotated[tuple[str, ...], Meta(min_length=1)] = ("*",)
    freeze: tuple[str, ...] = ()
    output: str | None = None
    target: Literal["label", "input"] = "label"
