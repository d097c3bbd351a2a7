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
        "0 Residual got [batch, 3]; its body makes [batch, 2] of it, but its input",
    ),
    (
        [nn.Residual(nn.Tanh(), shortcut=nn.Linear(3, 2))],
        (3,),
        "but its shortcut is [batch, 2]: give a shortcut",
    ),
    (
        [nn.ConvTranspose2d(2, 2, 1, 1, 2)],
        (2, 4, 4),
        "it takes a larger image: its padding leaves 0 x 0 of this one",
    ),
)

test_a_wrong_argument_is_refused = refuses_arguments(
    (nn.Sequential, "Sequential has no layers; give one at least"),
    (lambda: nn.Sequential(nn.ReLU), "at place 0 is not a layer; write ReLU(...)"),
    (nn.Residual, "Residual has no layers"),
    (lambda: nn.Residual(nn.ReLU(), shortcut=3), "Residual: 3 at place 0 is not a layer"),
)
