"""Replaces torch's random numbers with the fixed ones that a training graph draws in an export check."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from edgeasync.autodiff.chance import GOLDEN, WIDTH


class SameDraws(TorchDispatchMode):  # type: ignore[misc]
    """Makes torch draw the same numbers as `edgeasync.autodiff.chance`.

    These numbers depend only on the shape. Random functions that are not supported stay unchanged.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(found, Tensor):
            given = {entry.name: entry.default_value for entry in func._schema.arguments}  # noqa: SLF001
            given |= dict(zip(given, args, strict=False)) | (kwargs or {})
            name = func._schema.name.removeprefix("aten::").rstrip("_").removesuffix("_like")  # noqa: SLF001
            if (values := _drawn(name, uniform(found), given)) is not None:
                found.copy_(values)
        return found


def uniform(like: Tensor) -> Tensor:
    """Return float64 numbers between 0 and 1 that depend only on the shape of `like`."""
    places = torch.arange(1, like.numel() + 1, dtype=torch.float64) * GOLDEN
    return (places - places.floor()).reshape(like.shape)


def _drawn(name: str, share: Tensor, given: dict[str, Any]) -> Tensor | None:
    """Convert uniform numbers `share` to the distribution of the random function `name`.

    Return `None` if the function is not supported.
    """
    single = share.float()
    match name:
        case "rand":
            return share
        case "uniform":
            return given["from"] + (given["to"] - given["from"]) * share
        case "randint":
            low = given.get("low") or 0
            return (low + (given["high"] - low) * share).floor()
        case "randn":
            return WIDTH * (share - 0.5)
        case "normal":
            mean, deviation = [_double(given[key]) for key in ("mean", "std")]
            return mean + deviation * WIDTH * (share - 0.5)
        case "bernoulli":
            return single < (given["self"] if given.get("p") is None else given["p"])
        case "exponential":
            return -share.log() / given["lambd"]
    return None


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value
