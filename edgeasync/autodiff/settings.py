"""Settings of a training graph: loss, trained parameters, and output.

This module does not import `onnx`, so that settings can be validated anywhere.
"""

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Literal, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from edgeasync.config import Section
from edgeasync.errors import arguments
from edgeasync.lora import LoraSetting, find_lora
from edgeasync.losses import LossSetting
from edgeasync.parameters import matches

Base = Literal["int8", "int4"]
"""Type of quantized weights."""


class GraphSettings(Section, frozen=True):
    """Settings for converting a forward model to a training graph.

    `train` and `freeze` are shell patterns for parameter names. A parameter is trained if a pattern
    of `train` matches it and no pattern of `freeze` does. If `train` is not set, all parameters are
    trained, except those that the file marks as frozen and tensors that may not be parameters. A
    parameter that matches `train` is trained even if the exporter may have merged or precomputed
    it. `output` names the tensor that the loss uses; it may be omitted if the model has only one
    output that can be meant. With `target = "input"`, every example is its own target, as in an
    autoencoder.
    """

    loss: LossSetting = "cross_entropy"
    """Loss of a forward model: `cross_entropy`, `mse`, `l1`, `huber` or `bce_with_logits`."""
    train: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    """Pattern for parameters to train, such as `head.*`. Parameters that no pattern matches stay
    unchanged. By default, all parameters are trained except those that [the file marks as
    frozen](/reference/training_graph.md#what-is-trained). A parameter that matches a pattern is
    trained even if the exporter seems to have merged it with others or computed it from them.
    """
    freeze: tuple[str, ...] = ()
    """Pattern for parameters that are not trained. It overrides `train`."""
    output: str | None = None
    """Tensor that the loss uses; needed if the model has several outputs that it may be."""
    target: Literal["label", "input"] = "label"
    """Target of the loss: the data's `y` (`label`), or the example itself (`input`). `input` makes
    an autoencoder.
    """
    recompute: bool = False
    """Compute layers a second time during the backward pass, instead of keeping their results in
    memory. A step takes up to a third longer, and its gradients stay the same.
    """
    lora: LoraSetting | None = None
    """Rank of [LoRA adapters](/train/lora.md), optionally with patterns of layers, as in
    `8:*.q_proj,*.v_proj`. Only the adapters are trained, and what `train` adds. A settings file may
    use a table instead, such as `{ rank = 8, alpha = 32, targets = "*.q_proj" }`.
    """
    base: Base | None = None
    """Quantize frozen weights to `int8` or `int4`, in the file, on the wire and in memory.
    Trained parameters stay float32. See [Quantized
    weights](/reference/training_graph.md#quantized-weights).
    """

    def __post_init__(self) -> None:
        if self.lora is not None:
            find_lora(self.lora)

    def names(self, parameter: str) -> bool:
        """Return whether a pattern of `train` matches the name of a parameter."""
        return any(matches(parameter, pattern) for pattern in self.train or ())


NAMES_MAX = 8
"""Maximum number of parameters that a message lists before it uses patterns."""


def patterns_for(names: Sequence[str], others: Collection[str]) -> list[str]:
    """Return `names`, or if there are many, shell patterns that match them and none of `others`.

    >>> patterns_for([f"features.{n}.weight" for n in range(9)], ["head.weight"])
    ['features.*']
    """
    if len(names) <= NAMES_MAX:
        return list(names)
    found: list[str] = []
    for name in names:
        if any(matches(name, pattern) for pattern in found):
            continue
        prefixes = [name[: separator.end()] for separator in re.finditer(r"[._/:]+", name)]
        fitting = [
            prefix
            for prefix in prefixes
            if not re.search(r"[*?[]", prefix) and not any(other.startswith(prefix) for other in others)
        ]
        found.append(f"{fitting[0]}*" if fitting else name)
    return found


Settings = TypeVar("Settings", bound=GraphSettings)

NEXT_ERROR = "; after that: "
"""Separates the message of an error from that of the error which follows after its advice."""


def follow(settings: Settings, message: str) -> Settings | None:
    """Return the settings that the message of a failed build advises, or `None` without advice."""
    advice = arguments(message)
    if "freeze" in advice:  # prefer freezing, because training could change constants
        advice = {"freeze": (*settings.freeze, *advice["freeze"])}
    return replace(settings, **advice) if advice else None


def _is_flag(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def advised_flags(settings: GraphSettings, message: str) -> list[str]:
    """Return the command-line flags to try after a build failed with this message.

    Return no flags if the last error would remain after following all advice.
    """
    advised, default = settings, GraphSettings()
    for part in message.split(NEXT_ERROR):
        followed = follow(advised, part)
        if followed is None:
            return []
        advised = followed
    flags = []
    for name in GraphSettings.__struct_fields__:
        value = getattr(advised, name)
        if value != getattr(default, name):
            values = value if isinstance(value, tuple) else [value]
            flags += [word for each in values if _is_flag(each) for word in (f"--{name}", str(each))]
            flags += [f"--{name}"] if value is True else []
    return flags
