"""Settings of a training graph: loss, trained parameters, and output.

This module does not import `onnx`, so that settings can be validated anywhere.
"""

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from msgspec import Meta

from edgeasync.config import Section
from edgeasync.losses import LossSetting


class GraphSettings(Section, frozen=True):
    """Settings for converting a forward model to a training graph.

    `train` and `freeze` are shell patterns for parameter names. A parameter is trained if a pattern
    of `train` matches it and no pattern of `freeze` does. If `train` is not set, all parameters are
    trained, except those that the file marks as frozen and tensors that may not be parameters. A
    parameter that matches `train` is trained even if the exporter may have merged or precomputed
    it. `output` names the tensor that the loss uses; it may be omitted if the model has only one
    floating-point output. With `target = "input"`, every example is its own target, as in an
    autoencoder.
    """

    loss: LossSetting = "cross_entropy"
    """Loss of a forward model: `cross_entropy`, `mse`, `l1`, `huber` or `bce_with_logits`."""
    train: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    """Pattern for parameters to train, such as `head.*`. Parameters that no pattern matches stay
    unchanged. By default, all parameters are trained except those that [the file marks as
    frozen](/reference/training_graph.md#what-is-trained). Parameters that match a pattern are
    trained even if the exporter may have merged or computed them.
    """
    freeze: tuple[str, ...] = ()
    """Pattern for parameters that are not trained. It overrides `train`."""
    output: str | None = None
    """Tensor that the loss uses; needed if the model has several floating-point outputs."""
    target: Literal["label", "input"] = "label"
    """Target of the loss: the data's `y` (`label`), or the example itself (`input`). `input` makes
    an autoencoder.
    """
    recompute: bool = False
    """Compute norms and activations a second time during the backward pass, instead of keeping
    their results in memory. A step takes longer, and its gradients stay the same.
    """

    def names(self, parameter: str) -> bool:
        """Return whether a pattern of `train` matches the name of a parameter."""
        return any(fnmatchcase(parameter, pattern) for pattern in self.train or ())
