"""Ready-made models with random values; nothing is downloaded."""

from pathlib import Path

from edgeasync import nn
from edgeasync.async_train.model import Model
from edgeasync.errors import ConfigError

__all__ = ["resnet50"]

PRETRAINED = Path("~/.cache/edgeasync/models")
"""The folder from which files are read if `pretrained` is `True`."""


def resnet50(
    pretrained: bool | str | Path = False,  # noqa: FBT001, FBT002 - like torchvision
    *,
    classes: int = 1000,
    side: int = 224,
    seed: int = 0,
) -> Model:
    """Return a ResNet-50 for images `(3, side, side)` (He et al. 2015, arXiv:1512.03385).

    `pretrained` is the path of an ONNX file, or `True` for `resnet50.onnx` in the folder
    `PRETRAINED`. Raises `ConfigError` if the file does not exist.

    >>> from edgeasync.async_train import models
    >>> model = models.resnet50(classes=10, side=32)
    """
    if pretrained is not False:
        path = (PRETRAINED / "resnet50.onnx" if pretrained is True else Path(pretrained)).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"{path}: no such file; store an ONNX file of ResNet-50 there (nothing is downloaded), or remove "
                "pretrained"
            )
        return Model(path)
    layers: list[nn.Layer] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    width = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            layers += [_bottleneck(width, inner, stride, widens=not block), nn.ReLU()]
            width = 4 * inner
    layers += [nn.GlobalAvgPool(), nn.Linear(width, classes)]
    return Model(nn.Sequential(*layers), input_shape=(3, side, side), seed=seed)


def _bottleneck(width: int, inner: int, stride: int, *, widens: bool) -> nn.Layer:
    out = 4 * inner
    shortcut = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out)) if widens else None
    return nn.Residual(
        nn.Conv2d(width, inner, 1, bias=False),
        nn.BatchNorm2d(inner),
        nn.ReLU(),
        nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
        nn.BatchNorm2d(inner),
        nn.ReLU(),
        nn.Conv2d(inner, out, 1, bias=False),
        nn.BatchNorm2d(out),
        shortcut=shortcut,
    )
