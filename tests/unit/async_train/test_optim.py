"""Optimizers with PyTorch's arguments map to edgeasync's."""

import pytest

from edgeasync import SGD, Adam
from edgeasync.async_train import optim
from edgeasync.errors import ConfigError
from edgeasync.policies.optimizers import WeightDecay


def test_optimizers_are_edgeasyncs():
    assert optim.SGD(lr=0.1, momentum=0.9).optimizer() == SGD(learning_rate=0.1, momentum=0.9)
    assert optim.Adam(lr=0.1, betas=(0.8, 0.9)).optimizer() == Adam(learning_rate=0.1, beta1=0.8, beta2=0.9)
    assert optim.SGD(lr=0.1, weight_decay=0.01).optimizer() == [WeightDecay(rate=0.01), SGD(learning_rate=0.1)]
    with pytest.raises(TypeError, match="lerning_rate"):
        optim.SGD(lerning_rate=0.1)
    with pytest.raises(ConfigError, match=r"model\.parameters\(\)"):
        optim.Adam(lr=0.1).step()
