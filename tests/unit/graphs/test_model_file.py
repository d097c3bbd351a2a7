"""Saving and loading a model file."""

import numpy as np
import pytest
import safetensors.numpy

from edgeasync.errors import ModelMismatchError, StorageError
from edgeasync.graphs.model_file import load_model, save_model
from edgeasync.parameters import Parameter, ParameterSpec

SPEC = ParameterSpec((Parameter("w", (2, 3)), Parameter("b", (3,))))
VECTOR = np.arange(9, dtype=np.float32)


def test_a_model_comes_back_to_the_bit_and_any_tool_can_read_it(tmp_path):
    path = tmp_path / "run" / "model.safetensors"
    save_model(path, SPEC, VECTOR, lineage="0" * 16, version=7)
    vector, version = load_model(path, SPEC)
    assert (vector.tobytes(), version) == (VECTOR.tobytes(), 7)
    arrays = safetensors.numpy.load_file(path)
    assert {name: array.shape for name, array in arrays.items()} == {"w": (2, 3), "b": (3,)}
    assert list(path.parent.iterdir()) == [path]


def test_a_model_of_another_maker_begins_at_version_0(tmp_path):
    safetensors.numpy.save_file(dict(SPEC.views(VECTOR)), tmp_path / "model.safetensors")
    assert load_model(tmp_path / "model.safetensors", SPEC)[1] == 0


def test_another_model_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    save_model(path, SPEC, VECTOR, lineage="0" * 16, version=7)
    other = ParameterSpec((Parameter("w", (3, 2)), Parameter("b", (3,))))
    with pytest.raises(ModelMismatchError, match=r"'w' has shape \(2, 3\), expected \(3, 2\)"):
        load_model(path, other)


def test_values_of_another_type_are_named(tmp_path):
    arrays = {name: array.astype(np.float64) for name, array in SPEC.views(VECTOR).items()}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(ModelMismatchError, match="float64"):
        load_model(tmp_path / "model.safetensors", SPEC)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"{}"])
def test_a_broken_file_is_named(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"model\.safetensors: not a readable safetensors file"):
        load_model(path, SPEC)
