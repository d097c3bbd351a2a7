"""LoRA: train two small matrices beside each chosen layer, and freeze the layer itself.

Hu et al. 2021, arXiv:2106.09685. `docs/train/lora.md` shows how to use it. This module does not
import the `onnx` package.

>>> import numpy as np
>>> from edgeasync import Stop, lora, nn, train
>>> x = np.random.default_rng(0).normal(size=(200, 3))
>>> adapters = lora.LoRA(rank=2)
>>> run = train(nn.Linear(3, 4), (x, x[:, 0] > 0), lora=adapters, until=Stop(updates=20))
>>> {name: array.shape for name, array in run.arrays.items()}
{'0.lora_A.weight': (2, 3), '0.lora_B.weight': (4, 2)}
"""

from typing import Annotated

from msgspec import Meta

from edgeasync.config import Section
from edgeasync.errors import ConfigError
from edgeasync.parameters import matches

__all__ = ["LoRA"]

RANK_MAX = 4096


class LoRA(Section, frozen=True):
    """Adapters of a rank for the layers whose names match a pattern.

    A layer with the weight `W` then computes `W x + alpha / rank * B A x`. `A` starts with PEFT's
    random values, and `B` with zeros, so that training starts from the model in the file. The name
    of a layer is the name of its weight without `.weight`.

    >>> from edgeasync.lora import LoRA
    >>> LoRA(rank=8, alpha=16, targets="*.q_proj,*.v_proj").scaling
    2.0
    """

    rank: Annotated[int, Meta(ge=1, le=RANK_MAX)]
    """Number of rows of `A` and columns of `B`."""
    alpha: Annotated[float, Meta(gt=0.0, le=1e6)] = 16.0
    """The adapters' results are multiplied by `alpha / rank`."""
    targets: Annotated[str, Meta(min_length=1)] = "*"
    """Shell patterns for names of layers, separated by commas, such as `*.q_proj,*.v_proj`."""
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0
    """Seed of the random values in `A`."""

    @property
    def scaling(self) -> float:
        """The factor of the adapters' results."""
        return self.alpha / self.rank

    @property
    def patterns(self) -> list[str]:
        """The patterns of `targets`."""
        return [pattern.strip() for pattern in self.targets.split(",")]

    def adapts(self, layer: str) -> bool:
        """Return whether a pattern matches the name of a layer.

        >>> from edgeasync.lora import LoRA
        >>> LoRA(rank=8, targets="*.q_proj").adapts("layers.0.q_proj")
        True
        """
        return any(matches(layer, pattern) for pattern in self.patterns)


LoraSetting = int | str | LoRA
"""Adapters: a rank, the text `RANK:PATTERN`, or a `LoRA`, which is a table in a settings file."""


def find_lora(setting: LoraSetting) -> LoRA:
    """Return the adapters for a setting. Raises `ConfigError`.

    >>> from edgeasync.lora import find_lora
    >>> find_lora("8:*.q_proj")
    LoRA(rank=8, alpha=16.0, targets='*.q_proj', seed=0)
    """
    if isinstance(setting, LoRA):
        return setting
    rank, colon, pattern = str(setting).partition(":")
    if not (rank.isdecimal() and len(rank) < 5 and 1 <= int(rank) <= RANK_MAX) or (colon and not pattern):
        raise ConfigError(
            f"lora: {setting!r} is not a rank from 1 to {RANK_MAX}, with or without a pattern of layers; use 8 or "
            "8:*.q_proj"
        )
    return LoRA(rank=int(rank), targets=pattern) if colon else LoRA(rank=int(rank))
