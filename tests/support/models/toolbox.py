"""A small model of `edgeasync.async_train.nn`, and a batch that it can learn."""

import numpy as np

from edgeasync.async_train import nn
from edgeasync.async_train.arrays import as_array


def batch(count=64, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return as_array(x), as_array((x[:, 0] > x[:, 1]).astype(np.int64))


def model():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2), seed=1)
