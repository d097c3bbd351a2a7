"""Networks of several layers; every layer has a test."""

import numpy as np
import onnx

from edgeasync import nn
from tests.support.models.layers import numbers, run
from tests.unit.nn import (
    test_attention,
    test_basic,
    test_containers,
    test_convolution,
    test_normalization,
    test_recurrent,
)

TESTS = (test_attention, test_basic, test_containers, test_convolution, test_normalization, test_recurrent)


def test_every_layer_is_tried():
    kinds = {type(layer).__name__ for tests in TESTS for layer, *_ in tests.LAYERS}
    assert kinds | {"Embedding", "Layer", "save", "to_onnx"} == set(nn.__all__)


def test_an_lstm_classifier_can_be_written():
    model = nn.Sequential(nn.LSTM(3, 8, return_sequences=True), nn.Dropout(), nn.GRU(8, 8), nn.Linear(8, 4))
    proto = nn.to_onnx(model, (7, 3), seed=0)
    onnx.checker.check_model(proto, full_check=True)
    x = numbers((5, 7, 3))
    assert run(proto, x).shape == (5, 4)
    np.testing.assert_allclose(run(proto, x[:1]), run(proto, x)[:1], rtol=1e-5, atol=1e-6)
