"""`Rounding.undo` restores the loaded vector to the bit, even where float16 overflows."""

import numpy as np

from edgeasync.training.rounding import Rounding


def undone(vector, held, found):
    rounding = Rounding(vector, lambda values: np.copyto(values, held))
    values = found.astype(np.float32)
    rounding.undo(values)
    return values


def test_what_has_not_changed_is_the_vector_again():
    vector = np.array([0.1, -0.0, 1e5, -1e5, 1e-9, 3.0], np.float32)
    with np.errstate(over="ignore"):
        held = vector.astype(np.float16)
    assert np.isinf(held[2])
    values = undone(vector, held, held)
    assert values.tobytes() == vector.tobytes()


def test_what_has_changed_is_the_vector_and_the_change():
    vector = np.array([0.1, 0.2, 1e5], np.float32)
    with np.errstate(over="ignore"):
        held = vector.astype(np.float16)
    values = undone(vector, held, held + np.array([0.5, 0.0, 0.0], np.float16))
    assert abs(values[0] - 0.6) < 1e-3
    assert (values[1:] == vector[1:]).all()


def test_a_model_that_rounds_nothing_is_left_alone():
    vector = np.array([0.1, 0.2], np.float32)
    found = np.array([5.0, np.nan], np.float32)
    np.testing.assert_array_equal(undone(vector, vector, found), found)
