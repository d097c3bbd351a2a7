"""Networks of several layers; every layer has a test."""

import numpy as np
import onnx

from edgeasync import nn
from tests.support.models.layers import numbers, parameters, run
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


def test_a_transformer_encoder_can_be_written():
    def block(width):
        return [
            nn.Residual(nn.LayerNorm(width), nn.SelfAttention(width, 4), nn.Dropout(0.1)),
            nn.Residual(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)),
        ]

    model = nn.Sequential(
        nn.Embedding(11, 16),
        nn.PositionEmbedding(6, 16),
        *block(16),
        *block(16),
        nn.MeanOverTime(),
        nn.Linear(16, 3),
    )
    proto = nn.to_onnx(model, (6,), seed=0)
    onnx.checker.check_model(proto, full_check=True)
    assert "2.body.1.in_proj_weight" in parameters(proto)
    x = np.random.Generator(np.random.PCG64(5)).integers(0, 11, (5, 6))
    scores = run(proto, x)
    assert scores.shape == (5, 3)
    np.testing.assert_allclose(run(proto, x[:1]), scores[:1], rtol=1e-5, atol=1e-5)
    assert not np.allclose(run(proto, x[:, ::-1].copy()), scores, atol=1e-3)


def test_an_lstm_classifier_can_be_written():
    model = nn.Sequential(nn.LSTM(3, 8, return_sequences=True), nn.Dropout(), nn.GRU(8, 8), nn.Linear(8, 4))
    proto = nn.to_onnx(model, (7, 3), seed=0)
    onnx.checker.check_model(proto, full_check=True)
    x = numbers((5, 7, 3))
    assert run(proto, x).shape == (5, 4)
    np.testing.assert_allclose(run(proto, x[:1]), run(proto, x)[:1], rtol=1e-5, atol=1e-6)
