"""Loss functions of `nn`, against the losses that edgeasync trains with."""

import numpy as np
import pytest

from edgeasync import losses
from edgeasync.async_train import nn
from tests.support.models.toolbox import batch


@pytest.mark.parametrize(
    ("ours", "loss", "targets"),
    [
        (nn.CrossEntropyLoss(weight=[1, 2], label_smoothing=0.1), losses.CrossEntropy, np.array([0, 1, 1])),
        (nn.CrossEntropyLoss(ignore_index=1), losses.CrossEntropy, np.array([0, 1, 0])),
        (nn.MSELoss(), losses.MeanSquaredError, np.ones((3, 2), np.float32)),
        (nn.L1Loss(), losses.MeanAbsoluteError, np.ones((3, 2), np.float32)),
        (nn.HuberLoss(delta=0.5), losses.Huber, np.ones((3, 2), np.float32)),
        (nn.BCEWithLogitsLoss(), losses.BinaryCrossEntropy, np.ones((3, 2), np.float32)),
    ],
)
def test_a_loss_on_scores_is_the_loss_that_edgeasync_trains_with(ours, loss, targets):
    assert isinstance(ours.loss(), loss)
    network = nn.Sequential(nn.Linear(4, 2), seed=2)
    x = batch(3)[0]
    assert ours(network(x), targets) == pytest.approx(network.network.gradient(x, targets, ours.loss()).loss)
