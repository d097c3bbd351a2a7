"""Containers: `Sequential` and `Residual`."""

import numpy as np
import pytest

from edgeasync import nn
from edgeasync.errors import ConfigError
from tests.support.models.layers import (
    check_layer,
    check_shape_refused,
)

LAYERS = [
    (
        nn.Residual(nn.Linear(3, 3), nn.ReLU()),
        (3,),
        lambda x, p: x + np.maximum(x @ p["0.body.0.weight"].T + p["0.body.0.bias"], 0),
    ),
    (
        nn.Residual(nn.Linear(3, 2), shortcut=nn.Sequential(nn.Linear(3, 2, bias=False))),
        (3,),
        lambda x, p: x @ (p["0.body.0.weight"] + p["0.shortcut.0.weight"]).T + p["0.body.0.bias"],
    ),
    (
        nn.Sequential(nn.Sequential(nn.Linear(3, 2)), nn.Tanh()),
        (3,),
        lambda x, p: np.tanh(x @ p["0.0.weight"].T + p["0.0.bias"]),
    ),
]


@pytest.mark.parametrize(("layer", "dims", "reference"), LAYERS, ids=lambda case: type(case).__name__)
def test_a_layer_computes_what_it_says(layer, dims, reference):
    check_layer(layer, dims, reference)


@pytest.mark.parametrize(
    ("layers", "dims", "sentence"),
    [
        (
            [nn.Residual(nn.Linear(3, 2))],
            (3,),
            "0 Residual got [batch, 3]; its body converts that to [batch, 2], but its input",
        ),
        (
            [nn.Residual(nn.Tanh(), shortcut=nn.Linear(3, 2))],
            (3,),
            "but its shortcut is [batch, 2]; use a shortcut",
        ),
        (
            [nn.ConvTranspose2d(2, 2, 1, 1, 2)],
            (2, 4, 4),
            "but needs a larger image: its padding reduces this one to 0 x 0",
        ),
    ],
)
def test_a_wrong_shape_is_refused_with_the_layer_s_path(layers, dims, sentence):
    check_shape_refused(layers, dims, sentence)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (nn.Sequential, "Sequential has no layers; pass at least one"),
        (lambda: nn.Sequential(nn.ReLU), "at position 0 is not a layer; use ReLU(...)"),
        (nn.Residual, "Residual has no layers"),
        (lambda: nn.Residual(nn.ReLU(), shortcut=3), "Residual: 3 at position 0 is not a layer"),
    ],
)
def test_a_wrong_argument_is_refused(make, sentence):
    with pytest.raises(ConfigError) as caught:
        make()
    assert sentence in str(caught.value)
