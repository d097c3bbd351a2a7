"""Evaluation of NumPy models."""

import math
import tracemalloc

import numpy as np
import pytest

from edgeasync.data.dataset import Dataset
from edgeasync.errors import DataError, ModelMismatchError
from edgeasync.training import losses
from edgeasync.training.evaluation import ROWS_MAX, EvaluationResult, NumpyEvaluator, add_up, rows_at_once
from edgeasync.training.numpy_models import MlpModel, SoftmaxModel
from tests.support.models.gradients import numbers

N = ROWS_MAX + 44
LABELS = np.arange(N) % 3


def test_a_case_by_hand():
    model = SoftmaxModel(inputs=1, classes=2)
    vector = np.array([0.0, 1.0, 0.0, 0.0], np.float32)  # the score of class 1 is x, that of class 0 is 0
    x = np.log([[3.0], [1 / 3], [3.0], [4.0]])
    evaluated = NumpyEvaluator(model, Dataset.of(x, [1, 0, 0, 1]))(vector)
    assert evaluated.loss == pytest.approx(-math.log(3 / 4 * 3 / 4 * 1 / 4 * 4 / 5) / 4, abs=1e-6)
    assert (evaluated.accuracy, evaluated.examples) == (0.75, 4)


@pytest.mark.parametrize("model", [SoftmaxModel(inputs=6, classes=3), MlpModel(inputs=6, hidden=(5,), classes=3)])
@pytest.mark.parametrize("examples", [1, ROWS_MAX, N])
def test_numpy_models_agree_with_their_own_loss_and_predictions(model, examples):
    x, y = numbers((N, 2, 3))[:examples], LABELS[:examples]
    vector = numbers(model.spec.length, 1)
    before = vector.copy()
    found = NumpyEvaluator(model, Dataset.of(x, y))(vector)
    assert found.loss == pytest.approx(model.gradient(vector, x, y, np.empty_like(vector)), abs=1e-5)
    assert found.accuracy == (model.predict(vector, x) == y).mean()
    assert found.examples == examples
    np.testing.assert_array_equal(vector, before)


def test_data_that_does_not_fit_a_numpy_model():
    model = SoftmaxModel(inputs=6, classes=3)
    for x, y, words in (
        (numbers((9, 5)), LABELS[:9], "5 features, but the hub's model expects 6"),
        (numbers((9, 6)), np.full(9, 3), "label 3 is out of range: the hub's model has 3 classes"),
        (numbers((9, 6)), numbers(9), r"expects one class number \(integer\) per example"),
    ):
        with pytest.raises(DataError, match=words):
            NumpyEvaluator(model, Dataset.of(x, y))
    with pytest.raises(ModelMismatchError, match="21 values"):
        NumpyEvaluator(model, Dataset.of(numbers((9, 6)), LABELS[:9]))(np.zeros(20, np.float32))


def test_batches_are_bounded():
    seen = []

    def loss_of(batch, labels):
        seen.append(len(batch))
        return losses.cross_entropy(np.zeros((len(batch), 3), np.float32), labels)

    found = add_up(numbers((N, 1)), LABELS, 100, loss_of)
    assert seen == [100, 100, 100]
    assert found == EvaluationResult(pytest.approx(math.log(3), abs=1e-6), 1 / 3, N)
    assert [rows_at_once(values) for values in (1, 8192, 1 << 20, 1 << 30)] == [ROWS_MAX, 128, 1, 1]


def test_an_evaluation_takes_little_memory():
    """All at once, the hidden layer alone would take 160 MB."""
    model = MlpModel(inputs=4, hidden=(2000,), classes=3)
    made = NumpyEvaluator(model, Dataset.of(numbers((20_000, 4)), np.zeros(20_000, int)))
    vector = model.initial(0)
    tracemalloc.start()
    made(vector)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_model_that_diverged_has_a_loss_that_is_not_finite():
    model = SoftmaxModel(inputs=6, classes=3)
    data = Dataset.of(numbers((9, 6)), LABELS[:9])
    for value in (np.nan, np.inf, 3e38):
        assert not math.isfinite(NumpyEvaluator(model, data)(np.full(model.spec.length, value, np.float32)).loss)
