"""Derives the shape of an example from a model's layers, before any data are available."""

from collections.abc import Iterator, Sequence

from edgeasync import nn
from edgeasync.errors import ConfigError

SIDES = (28, 32, 224, 8, 16, 64, 12, 14, 20, 24, 40, 48, 56, 96, 100, 112, 128, 160, 192, 227, 256, 299, 384, 512)
"""Heights and widths of images to try, with common values first."""

_ANY = (32, 224)
"""Two image sizes; a model that accepts both is assumed to accept images of any size."""


def input_shape_of(layer: nn.Layer, usual: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return the shape of an example, from the first dense layer or by trying image sizes.

    If the layers do not determine the shape, return `usual`, or raise `ConfigError` if `usual` is
    `None`.

    >>> from edgeasync import nn
    >>> from edgeasync.async_train.shapes import input_shape_of
    >>> input_shape_of(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
    (784,)
    >>> input_shape_of(nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(676, 10)))
    (1, 28, 28)
    """
    first = next((each for each in _layers(layer) if _tells(each)), None)
    if isinstance(first, nn.Linear):
        return (first.in_features,)
    if isinstance(first, nn.BatchNorm1d):
        return (first.num_features,)
    channels = {nn.Conv2d: "in_channels", nn.BatchNorm2d: "num_features"}.get(type(first))  # type: ignore[arg-type]
    if channels is not None:
        count = int(getattr(first, channels))
        if not all(_fits(layer, (count, side, side)) for side in _ANY):
            for side in SIDES:
                if _fits(layer, (count, side, side)):
                    return count, side, side
    if usual is not None:
        return usual
    raise ConfigError(
        "the layers do not determine the shape of an example: pass nn.Sequential(..., input_shape=(3, 32, 32)), "
        "or call the model on data first"
    )


def _layers(layer: nn.Layer) -> Iterator[nn.Layer]:
    parts: Sequence[nn.Layer] = (
        layer.layers if isinstance(layer, nn.Sequential) else layer.body if isinstance(layer, nn.Residual) else ()
    )
    if not parts:
        yield layer
    for part in parts:
        yield from _layers(part)


def _tells(layer: nn.Layer) -> bool:
    """Return whether a layer may determine the input shape; an activation, for example, does not."""
    return not isinstance(
        layer, nn.ReLU | nn.LeakyReLU | nn.Sigmoid | nn.Tanh | nn.GELU | nn.Hardswish | nn.Dropout | nn.Flatten
    )


def _fits(layer: nn.Layer, shape: tuple[int, ...]) -> bool:
    try:
        nn.to_onnx(layer, shape)
    except ConfigError:
        return False
    return True
