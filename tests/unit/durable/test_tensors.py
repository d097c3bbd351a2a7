"""The safetensors format."""

import contextlib

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from edgeasync.durable.tensors import read_tensors, tensor_parts
from tests.support.parts.tensors import TENSORS, same


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.sampled_from([np.float32, np.uint8]).flatmap(
            lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=4))
        ),
        max_size=6,
    )
)
def test_the_format_is_that_of_the_safetensors_library(tensors):
    content = b"".join(bytes(part) for part in tensor_parts(tensors))
    for found in (safetensors.numpy.load(content), read_tensors(content)):
        assert set(found) == set(tensors)
        for name, tensor in tensors.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert found[name].tobytes() == tensor.tobytes()
    assert len(tensor_parts(tensors)[0]) % 8 == 0


def test_arrays_are_written_from_their_own_memory_and_read_in_place():
    parts = tensor_parts(TENSORS)
    assert sum(np.shares_memory(np.frombuffer(part, np.uint8), TENSORS["weight"]) for part in parts) == 1
    content = b"".join(bytes(part) for part in parts)
    assert np.shares_memory(read_tensors(content)["weight"], np.frombuffer(content, np.uint8))
    assert all(tensor.flags.aligned for tensor in read_tensors(content).values())


def test_a_file_of_the_safetensors_library_is_read():
    content = safetensors.numpy.save(TENSORS, metadata={"made": "elsewhere"})
    assert same(read_tensors(content), TENSORS)


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda b: len(b).to_bytes(8, "little") + b))
def test_bytes_that_are_no_safetensors_file_are_a_value_error(content):
    with contextlib.suppress(ValueError):
        read_tensors(content)


@pytest.mark.parametrize(
    "place",
    [
        {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]},
        {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]},
        {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]},
    ],
)
def test_an_array_outside_the_file_is_a_value_error(place):
    header = msgspec.json.encode({"x": place})
    with pytest.raises(ValueError, match="array of"):
        read_tensors(len(header).to_bytes(8, "little") + header + bytes(8))
