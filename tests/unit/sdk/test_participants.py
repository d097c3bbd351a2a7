"""Named arrays in a session, and what is said when the loop has put others in their place."""

import numpy as np
import pytest

from edgeasync.errors import ModelMismatchError
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.sdk.participants import ArrayParticipant, check_same


def arrays(**values):
    return {name: np.asarray(value) for name, value in values.items()}


def test_an_array_of_the_same_shape_may_take_the_place_of_another():
    model = arrays(w=np.zeros(3), b=np.zeros((2, 1), np.float32))
    held = ArrayParticipant(model)
    model["w"] = np.arange(3.0)
    found = arrays(w=np.empty(3, np.float32), b=np.empty((2, 1), np.float32))
    held.read(found)
    assert found["w"].tolist() == [0.0, 1.0, 2.0]
    held.write(arrays(w=np.full(3, 7.0, np.float32), b=np.zeros((2, 1), np.float32)))
    assert model["w"].tolist() == [7.0, 7.0, 7.0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: model.update(w=np.zeros(1)), r"model\['w'\] has shape \(1,\), but had \(3,\) at join"),
        (lambda model: model.update(w=np.zeros((2, 3))), r"model\['w'\] has shape \(2, 3\)"),
        (lambda model: model.update(w=np.zeros(3, int)), r"model\['w'\] is no longer a writable array of floats"),
        (lambda model: model.update(w=[0.0] * 3), r"model\['w'\] is no longer a writable array of floats"),
        (lambda model: model["w"].setflags(write=False), r"model\['w'\] is no longer a writable array of floats"),
        (lambda model: model.pop("w"), r"model\['w'\] is no longer a writable array of floats"),
        (lambda model: model.update(head=np.zeros(2)), r"model\['head'\] was added after join"),
    ],
    ids=["broadcast", "more axes", "integers", "a list", "read-only", "gone", "added"],
)
def test_other_arrays_are_told_by_name(change, told):
    model = arrays(w=np.zeros(3), b=np.zeros(2))
    held = ArrayParticipant(model)
    change(model)
    for use in (held.read, held.write):
        with pytest.raises(ModelMismatchError, match=told):
            use(arrays(w=np.zeros(3, np.float32), b=np.zeros(2, np.float32)))


@pytest.mark.parametrize("whose", ["your", "the hub's"])
def test_names_that_a_wrapper_has_put_before_all_are_told(whose):
    plain, wrapped = ([Parameter(f"{prefix}{name}", (2,)) for name in "ab"] for prefix in ("", "module."))
    ours, hubs = (wrapped, plain) if whose == "your" else (plain, wrapped)
    with pytest.raises(ModelMismatchError, match=rf"{whose} model is wrapped: its arrays begin with 'module\.'"):
        check_same(ours, ParameterSpec(tuple(hubs)))
