"""Layers compare by value."""

import numpy as np

from edgeasync import nn
from tests.support.models.layers import parameters


def test_descriptions_are_values():
    assert nn.Sequential(nn.Linear(3, 2), nn.ReLU()) == nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    assert nn.Conv2d(1, 2, 3) != nn.Conv2d(1, 2, 3, padding=1)
    block = nn.Linear(3, 3)
    twice = parameters(nn.to_onnx(nn.Sequential(block, block), (3,)))
    assert not np.array_equal(twice["0.weight"], twice["1.weight"])
    assert nn.to_onnx(nn.Linear(np.int64(3), 2), (3,)) == nn.to_onnx(nn.Linear(3, 2), (3,))
