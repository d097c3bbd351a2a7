"""Where a device begins again whose local step has left a model that is not finite."""

import numpy as np
import pytest

from edgeasync.training.last_finite import LastFinite


@pytest.fixture
def trained():
    """A model that a step has left at 1, and what keeps it."""
    last, model = LastFinite(), np.ones(3, np.float32)
    last.note_step()
    assert last.keep(model, 7)
    return last, model


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_model_that_is_not_finite_is_replaced_by_the_copy_and_never_copied(trained, value):
    last, model = trained
    model[1] = value
    last.note_step()
    assert not last.keep(model, 8)
    assert last.restore(model)
    assert last.is_restored
    assert model.tolist() == [1.0, 1.0, 1.0]
    assert last.copy[1] == 7
    last.note_step()
    assert not last.is_restored


def test_a_finite_model_stays_as_it_is(trained):
    last, model = trained
    model[:] = 3e38
    last.note_step()
    assert not last.restore(model)
    assert model.tolist() == [np.float32(3e38)] * 3


def test_a_mean_is_kept_only_once_a_step_has_gone_on_from_it(trained):
    last, model = trained
    model[:] = 2.0
    last.note_mean()
    assert not last.keep(model, 7)
    model[:] = np.nan
    last.note_step()
    assert last.restore(model)
    assert model.tolist() == [1.0, 1.0, 1.0]


def test_without_a_copy_nothing_is_restored():
    assert not LastFinite().restore(np.full(2, np.nan, np.float32))
