"""Containers: `Sequential` and `Residual`."""

import numpy as np

from edgeasync import nn
from tests.support.models.layers import computes, refuses_arguments, refuses_shapes

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

test_a_layer_computes_what_it_says = computes(LAYERS)

test_a_wrong_shape_is_refused_with_the_layer_s_path = refuses_shapes(
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
        "needs a larger image: its padding reduces this one to 0 x 0",
    ),
)

test_a_wrong_argument_is_refused = refuses_arguments(
    (nn.Sequential, "Sequential has no layers; pass at least one"),
    (lambda: nn.Sequential(nn.ReLU), "at position 0 is not a layer; use ReLU(...)"),
    (nn.Residual, "Residual has no layers"),
    (lambda: nn.Residual(nn.ReLU(), shortcut=3), "Residual: 3 at position 0 is not a layer"),
)
