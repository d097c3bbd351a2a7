"""What a training graph is built for: the loss, the parameters it trains, and the output it reads.

Nothing here needs the `onnx` package, so that settings can be checked anywhere.
"""

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from msgspec import Meta

from edgeasync.config import Section
from edgeasync.losses import LossSetting


class GraphSettings(Section, frozen=True):
    """How a forward model becomes a training graph.

    `train` and `freeze` are shell patterns over parameter names: trained is what a pattern of `train` matches
    and none of `freeze`. Without `train` it is all that is surely a parameter, but what the file says was frozen.
    What a pattern matches counts as named, and is trained even if an exporter may have merged or computed it.
    `output` names the tensor that the loss reads; without it the model must have one output of floating-point
    values. `target = "input"` makes an autoencoder: every example is its own target.
    """

    loss: LossSetting = "cross_entropy"
    """Loss of a forward model: `cross_entropy`, `mse`, `l1`, `huber` or `bce_with_logits`."""
    train: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    """Parameters to train, a pattern such as `head.*`. Parameters that no pattern matches stay as they are.
    Without it all parameters are trained but those that [the file says were
    frozen](/reference/training_graph.md#what-is-trained). Those that a pattern matches are trained
    even if the exporter may have merged or computed them.
    """
    freeze: tuple[str, ...] = ()
    """Parameters not to train, a pattern. It counts although `train` matches them."""
    output: str | None = None
    """The tensor that the loss reads, if the model has several outputs of floating-point values."""
    target: Literal["label", "input"] = "label"
    """What the loss compares the output with: the data's `y` (`label`), or the example itself (`input`). `input`
    makes an autoencoder.
    """

    def names(self, parameter: str) -> bool:
        """Return whether a pattern of `train` matches a parameter."""
        return any(fnmatchcase(parameter, pattern) for pattern in self.train or ())
