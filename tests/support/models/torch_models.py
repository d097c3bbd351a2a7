"""The models whose gradients are compared, small, and with every parameter away from its first value if asked."""

import math

import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    def __init__(self, into, out, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.short = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        return torch.relu(self.body(x) + self.short(x))


class Squeeze(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x):
        share = functional.adaptive_avg_pool2d(x, 1)
        return x * functional.hardsigmoid(self.up(torch.relu(self.down(share))))


class Mobile(nn.Module):
    def __init__(self):
        super().__init__()
        self.begin = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish())
        self.body = nn.Sequential(
            nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish(),
            nn.Conv2d(16, 16, 5, 1, 2, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU6(), Squeeze(16),
            nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8),
        )  # fmt: skip
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.begin(x)
        return self.head((x + self.body(x)).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        length, width = x.shape[1], x.shape[2]
        parts = self.qkv(x).reshape(-1, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts[0], parts[1], parts[2]
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(-1, length, width))


class Transformer(nn.Module):
    def __init__(self, *, vocabulary=50, width=16, length=6, own=True):
        super().__init__()
        self.own = own
        self.embedding = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.1 * torch.randn(1, length, width))
        if own:
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attention = Attention(width, 4)
            self.inner = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        else:
            self.layer = nn.TransformerEncoderLayer(width, 4, 32, dropout=0.0, batch_first=True, activation="gelu")
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.place
        if self.own:
            x = x + self.attention(self.first(x))
            x = x + self.inner(self.second(x))
        else:
            x = self.layer(x)
        return self.head(self.last(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.cell = kind(5, 8, batch_first=True, **options)
        self.head = nn.Linear(16 if options.get("bidirectional") else 8, 3)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


def mlp():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def residual():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def sensors():
    return nn.Sequential(
        nn.Conv1d(6, 12, 5, 2, 2), nn.BatchNorm1d(12), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(12, 12, 3, 1, 1, groups=3), nn.LeakyReLU(0.1), nn.AvgPool1d(2), nn.Flatten(),
        nn.Dropout(0.0), nn.Linear(48, 4),
    )  # fmt: skip


def autoencoder():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 3, 2, 1, output_padding=1), nn.ELU(),
        nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Sigmoid(),
    )  # fmt: skip


def groups():
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Upsample(scale_factor=2),
        nn.Conv2d(8, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Softplus(), nn.Flatten(), nn.Linear(4 * 100, 3),
    )  # fmt: skip


def real(*shape):
    return lambda: torch.randn(*shape)


def tokens(*shape):
    return lambda: torch.randint(0, 50, shape)


MODELS = {
    "mlp": (mlp, real(8, 12), 5),
    "lenet": (lenet, real(4, 1, 28, 28), 10),
    "residual": (residual, real(4, 3, 16, 16), 5),
    "mobile": (Mobile, real(4, 3, 16, 16), 5),
    "own transformer": (Transformer, tokens(5, 6), 4),
    "torch's transformer": (lambda: Transformer(own=False), tokens(5, 6), 4),
    "large vocabulary": (lambda: Transformer(vocabulary=300), tokens(5, 6), 4),
    "sensors": (sensors, real(6, 6, 32), 4),
    "autoencoder": (autoencoder, real(3, 1, 12, 12), None),
    "groups": (groups, real(3, 2, 6, 6), 3),
    "gru": (lambda: Recurrent(nn.GRU), real(4, 7, 5), 3),
    "lstm": (lambda: Recurrent(nn.LSTM), real(4, 7, 5), 3),
    "two layers of lstm both ways": (
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
        real(4, 7, 5),
        3,
    ),
}


def make(name, *, fresh=True):
    """Return a model, a batch and its targets, and the loss. Not fresh: nothing has its first value any more."""
    torch.manual_seed(3)
    build, batch, classes = MODELS[name]
    model = build()
    if not fresh:
        with torch.no_grad():
            for entry in (*model.parameters(), *model.buffers()):
                if entry.is_floating_point():
                    entry.add_(0.05 * torch.rand_like(entry))
    x = batch()
    if classes is None:
        return model, x, x.sigmoid(), "mse"
    return model, x, torch.randint(0, classes, (len(x),)), "cross_entropy"
