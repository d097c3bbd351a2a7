"""Saving the best model in the format of its kind."""

import numpy as np
import onnx
import pytest

from edgeasync import nn
from edgeasync.callbacks import SaveBest
from edgeasync.errors import ConfigError
from tests.support.parts.events import best


def test_the_best_model_is_written_in_its_kind(tmp_path):
    proto = nn.to_onnx(nn.Linear(3, 2), (3,), seed=0)
    arrays = {"file": np.ones(3, np.float32), "a.b": np.zeros((2, 2), np.float32)}
    saver = SaveBest(tmp_path / "best")
    saver.on_best(best({}, lambda _: proto))
    assert saver.saved == tmp_path / "best.onnx"
    assert onnx.load(saver.saved) == proto
    saver.on_best(best(arrays))
    assert saver.saved == tmp_path / "best.npz"
    with np.load(saver.saved) as found:
        assert {name: found[name].tolist() for name in found} == {n: a.tolist() for n, a in arrays.items()}
    arrays_alone = SaveBest(tmp_path / "new" / "arrays.npz")
    arrays_alone.on_best(best(arrays, lambda _: proto))
    assert np.load(arrays_alone.saved)["file"].tolist() == [1.0] * 3
    with pytest.raises(
        ConfigError,
        match=r"best.onnx: only ONNX and edgeasync.nn models can be exported.* best\.safetensors or best\.npz",
    ):
        SaveBest(tmp_path / "best.onnx").on_best(best(arrays))
