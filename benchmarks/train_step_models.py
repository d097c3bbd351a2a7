"""The models of the training benchmark, written in ordinary torch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SEED = 0
CLASSES = 10


@dataclass(frozen=True)
class Model:
    """How to create a model, and the shape of one example."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]


class Residual(nn.Module):
    """Two convolutions with batch norms, and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result."""
        return torch.relu(x + self.body(x))


class Mobile(nn.Module):
    """An inverted residual block: widen, convolve each channel separately, narrow."""

    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(narrow, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish()),
            *(nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.Hardswish()),
            *(nn.Conv2d(wide, narrow, 1, bias=False), nn.BatchNorm2d(narrow)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result."""
        body: Tensor = self.body(x)
        return x + body


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return each token's attention output."""
        batch, tokens, width = x.shape
        each = width // self.heads
        parts = self.qkv(x).reshape(batch, tokens, 3, self.heads, each).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        shares = torch.softmax(query @ key.transpose(-1, -2) * each**-0.5, -1)
        gathered: Tensor = self.out((shares @ value).transpose(1, 2).reshape(batch, tokens, width))
        return gathered


class EncoderBlock(nn.Module):
    """A transformer block with pre-normalization."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.between = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result."""
        x = x + self.attention(self.before(x))
        fed: Tensor = self.feed(self.between(x))
        return x + fed


class Encoder(nn.Module):
    """Two blocks, and a classifier of the mean token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(EncoderBlock(width, 4), EncoderBlock(width, 4))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        scores: Tensor = self.head(self.blocks(x).mean(1))
        return scores


class Recurrent(nn.Module):
    """A recurrent layer, and a classifier of its last output."""

    def __init__(self, kind: type[nn.GRU | nn.LSTM]) -> None:
        super().__init__()
        self.layer, self.head = kind(6, 64, batch_first=True), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        scores: Tensor = self.head(self.layer(x)[0][:, -1])
        return scores


def mlp() -> nn.Module:
    """Return three linear layers."""
    return nn.Sequential(
        *(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, CLASSES)),
    )


def lenet() -> nn.Module:
    """Return LeNet-5 with rectifiers and max pools."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)),
    )


def residual() -> nn.Module:
    """Return a residual network with batch norms and an overlapping max pool."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(Residual(16), Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)),
    )


def depthwise() -> nn.Module:
    """Return a network of inverted residuals."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.Hardswish()),
        *(Mobile(16, 64), Mobile(16, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)),
    )


MODELS = {
    "mlp": Model(mlp, (784,)),
    "lenet": Model(lenet, (1, 28, 28)),
    "residual": Model(residual, (3, 32, 32)),
    "depthwise": Model(depthwise, (3, 32, 32)),
    "transformer": Model(lambda: Encoder(64), (32, 64)),
    "gru": Model(lambda: Recurrent(nn.GRU), (64, 6)),
    "lstm": Model(lambda: Recurrent(nn.LSTM), (64, 6)),
}


def make(name: str) -> nn.Module:
    """Return a model in training mode, always with the same initial weights."""
    torch.manual_seed(SEED)
    return MODELS[name].build().train()
