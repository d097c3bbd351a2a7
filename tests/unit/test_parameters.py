import msgspec
import numpy as np
import pytest

from edgeasync.errors import ModelMismatchError
from edgeasync.parameters import Parameter, ParameterSpec

SPEC = ParameterSpec(
    (
        Parameter("conv.weight", (2, 3)),
        Parameter("conv.scale", ()),
        Parameter("norm.mean", (4,), "statistic"),
    )
)


def test_lengths_count_values_and_split_by_role():
    assert [parameter.size for parameter in SPEC.parameters] == [6, 1, 4]
    assert (SPEC.length, SPEC.trained_length, SPEC.nbytes) == (11, 7, 44)


def test_views_share_memory_with_the_vector_in_order():
    vector = np.arange(11, dtype=np.float32)
    views = SPEC.views(vector)
    assert list(views) == ["conv.weight", "conv.scale", "norm.mean"]
    np.testing.assert_array_equal(views["conv.weight"], [[0, 1, 2], [3, 4, 5]])
    assert views["conv.scale"].shape == ()
    views["norm.mean"][0] = -1.0
    views["conv.scale"][...] = -2.0
    assert vector[7] == -1.0
    assert vector[6] == -2.0


def test_flatten_is_the_inverse_of_views_and_copies():
    vector = np.random.default_rng(0).standard_normal(11).astype(np.float32)
    flat = SPEC.flatten(SPEC.views(vector))
    np.testing.assert_array_equal(flat, vector)
    assert not np.shares_memory(flat, vector)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": np.zeros(1, np.float32)}, "array 'extra' is not part of this model"),
        ({"conv.weight": None}, "array 'conv.weight' of the model is missing"),
        ({"conv.weight": np.zeros((3, 2), np.float32)}, r"'conv.weight' has shape \(3, 2\), expected \(2, 3\)"),
        ({"conv.scale": np.zeros(1, np.float32)}, r"'conv.scale' has shape \(1,\), expected \(\)"),
    ],
)
def test_flatten_names_the_array_that_does_not_fit(change, message):
    arrays = {**SPEC.views(np.zeros(11, np.float32)), **change}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(ModelMismatchError, match=message):
        SPEC.flatten(arrays)


@pytest.mark.parametrize(
    "vector",
    [
        np.zeros(10, np.float32),
        np.zeros(11, np.float64),
        np.zeros((11, 1), np.float32),
        np.zeros(22, np.float32)[::2],
    ],
    ids=["length", "dtype", "dimensions", "stride"],
)
def test_check_refuses_what_is_not_a_flat_vector_of_this_spec(vector):
    with pytest.raises(ModelMismatchError, match="expected a flat float32 vector of 11 values"):
        SPEC.check(vector)


def test_repeated_name_is_refused():
    with pytest.raises(ValueError, match="parameter 'a' appears twice"):
        ParameterSpec((Parameter("a", (1,)), Parameter("b", (1,)), Parameter("a", (2,))))


def test_trained_after_statistic_is_refused():
    with pytest.raises(ValueError, match="before statistics"):
        ParameterSpec((Parameter("mean", (1,), "statistic"), Parameter("weight", (1,))))


def test_fingerprint_is_pinned():
    """Devices and hubs of different releases must agree on it: a change here is a change of protocol."""
    assert SPEC.fingerprint == "7164d0c2c232ccf6e65f4c55a04f6ac2"


@pytest.mark.parametrize(
    "other",
    [
        SPEC.parameters[:2],
        (Parameter("conv.weight", (3, 2)), *SPEC.parameters[1:]),
        (Parameter("conv.weights", (2, 3)), *SPEC.parameters[1:]),
        (SPEC.parameters[1], SPEC.parameters[0], SPEC.parameters[2]),
        (*SPEC.parameters[:2], Parameter("norm.mean", (4,))),
    ],
    ids=["fewer", "shape", "name", "order", "role"],
)
def test_fingerprint_differs_when_anything_does(other):
    assert ParameterSpec(other).fingerprint != SPEC.fingerprint


def test_fingerprint_survives_the_wire():
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(SPEC), type=ParameterSpec)
    assert again == SPEC
    assert again.fingerprint == SPEC.fingerprint


def test_a_role_that_is_not_known_is_named():
    with pytest.raises(ValueError, match="parameter 'mean' has the role 'buffer'; choose from trained, statistic"):
        ParameterSpec((Parameter("weight", (2,)), Parameter("mean", (2,), "buffer")))
