"""scikit-learn on a fleet: its own checks of estimators, and its estimators as models."""

import doctest
import pickle

import numpy as np
import pytest

pytest.importorskip("sklearn")
from sklearn.base import clone
from sklearn.linear_model import SGDClassifier, SGDRegressor
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.utils.estimator_checks import check_estimator

import edgeasync
from edgeasync import Adam, Agent, Dataset, Hub, Run, Stop, train
from edgeasync.data import load_digits
from edgeasync.errors import ConfigError, DataError
from edgeasync.sklearn import EdgeClassifier, EdgeRegressor, estimators, model, models
from edgeasync.training.plan import LocalTraining
from tests.support.programs.processes import PATIENCE_S

BY_TIMING = "several workers: the order of their updates depends on timing, so two fits differ"
EXCEPTIONS = dict.fromkeys(
    [
        "check_classifier_data_not_an_array",
        "check_fit_idempotent",
        "check_regressor_data_not_an_array",
        "check_regressors_int",
        "check_supervised_y_2d",
    ],
    BY_TIMING,
)


@pytest.mark.parametrize("kind", [EdgeClassifier, EdgeRegressor])
@pytest.mark.parametrize(("workers", "exceptions"), [(4, EXCEPTIONS), (1, {})])
def test_scikit_learn_has_checked_the_estimators(kind, workers, exceptions):
    assert kind().workers == 4
    found = check_estimator(
        kind(workers=workers), expected_failed_checks=exceptions, on_fail="raise", on_skip=None
    )
    assert len(found) > 40


@pytest.fixture(scope="module")
def digits():
    found = load_digits()
    return found.x, found.y


def test_labels_are_words_in_a_grid_search_over_a_pipeline(digits):
    x, numbers = digits
    y = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])[numbers]
    pipeline = make_pipeline(StandardScaler(), EdgeClassifier(random_state=0, until=Stop(epochs=20)))
    search = GridSearchCV(pipeline, {"edgeclassifier__hidden": [(), (32,)]}, cv=2).fit(x[:900], y[:900])
    assert search.score(x[900:], y[900:]) > 0.85
    best = search.best_estimator_[-1]
    np.testing.assert_allclose(best.predict_proba(x[:5]).sum(axis=1), 1.0)
    again = pickle.loads(pickle.dumps(search))
    assert list(again.predict(x[:20])) == list(search.predict(x[:20]))
    assert not hasattr(clone(best), "arrays_")


def test_partial_fit_trains_further(digits):
    x, y = digits
    classifier = EdgeClassifier(random_state=0)
    with pytest.raises(ValueError, match="classes must be passed"):
        classifier.partial_fit(x[:9], y[:9])
    scores = [classifier.partial_fit(x[:1400], y[:1400], range(10)).score(x[1400:], y[1400:]) for _ in range(8)]
    assert scores[-1] > max(0.8, scores[0])
    with pytest.raises(ValueError, match="not in classes"):
        classifier.partial_fit(x[:2], [3, 77])
    with pytest.raises(ValueError, match="classes differ"):
        classifier.partial_fit(x[:2], y[:2], [1, 2])
    regressor = EdgeRegressor((), workers=1, random_state=0)  # of more workers, timing orders the updates
    found = [regressor.partial_fit(x, x[:, 20]).score(x, x[:, 20]) for _ in range(5)]
    assert found[-1] > 0.8
    assert found[-1] > found[0]


@pytest.mark.parametrize(
    ("estimator", "accuracy"),
    [(SGDClassifier(learning_rate="constant", eta0=0.01), 0.8), (MLPClassifier((32,), random_state=0), 0.85)],
)
def test_an_estimator_is_trained_and_given_back_as_one(digits, estimator, accuracy):
    x, y = digits
    held_out = x[1400:], y[1400:]
    run = train(
        model(estimator, 64, 10), (x[:1400], y[:1400]), workers=2, evaluate=held_out, until=Stop(epochs=15)
    )
    assert type(run.model) is type(estimator)
    assert run.model.score(*held_out) == pytest.approx(run.accuracy)
    assert run.accuracy > accuracy
    assert not hasattr(estimator, "n_features_in_"), "it is copied"


def test_one_update_is_what_the_estimator_alone_does(digits):
    x, y = (array[:200] for array in digits)
    alone = SGDClassifier(random_state=0).partial_fit(x.astype(np.float32), y, classes=range(10))
    prepared = model(alone, 64, 10).prepare(LocalTraining(batch_size=200))
    trainer, vector = prepared.make_trainer(Dataset.of(x, y), 0, 1), prepared.initial.copy()
    trainer.begin(vector)
    for _ in range(3):
        trainer.step()
    assert (vector != prepared.initial).any()
    assert list(prepared.spec.views(vector)) == ["coef_", "intercept_"]
    np.testing.assert_array_equal(prepared.restore(prepared.spec.views(vector)).coef_, trainer._estimator.coef_)


def test_examples_that_are_read_when_they_are_drawn_can_evaluate():
    made = model(SGDClassifier(), features=3, classes=2)
    lazy = edgeasync.data.from_samples([(row, number % 2) for number, row in enumerate(np.eye(3))])
    run = train(made, (np.eye(3), [0, 1, 0]), evaluate=lazy, workers=1, until=Stop(updates=2))
    assert run.accuracy is not None


def test_an_estimator_takes_one_input():
    two = Dataset.of({"a": np.eye(3), "b": np.eye(3)}, [0, 1, 0])
    with pytest.raises(DataError, match="the data has the inputs a, b, but a single array x is expected"):
        model(SGDClassifier(), 3, 2).prepare(LocalTraining()).make_trainer(two, 0, 1)


def test_labels_in_a_column_are_those_of_the_examples(digits):
    x, y = (array[:200] for array in digits)
    prepared = model(SGDClassifier(random_state=0).fit(x, y), 64, 10).prepare(LocalTraining())
    found = [prepared.make_evaluator(Dataset.of(x, labels))(prepared.initial) for labels in (y, y[:, None])]
    assert found[0].accuracy == found[1].accuracy > 0.9


def test_an_agent_trains_a_regressor(tmp_path):
    x = np.random.default_rng(0).normal(size=(300, 3))
    given = model(SGDRegressor(random_state=0), 3)
    hub = Hub(given, run=tmp_path, bind="tcp://127.0.0.1:*", until=Stop(updates=20))
    with hub, Agent(hub.address, (x, x @ [1.0, -2.0, 0.5]), model=given) as agent:
        agent.wait(PATIENCE_S)
    np.testing.assert_allclose(Run.open(hub.path).arrays["coef_"], [1.0, -2.0, 0.5], atol=0.1)


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (lambda: model(SVC(), 3, 2), "estimator is SVC; pass one of SGDClassifier"),
        (lambda: model(SGDClassifier(), 3), "pass classes=N, the number of classes, for a classifier"),
        (lambda: model(SGDClassifier(average=True), 3, 2), "average and early_stopping work only in one process"),
        (
            lambda: model(SGDRegressor().partial_fit([[1]], [1]), 3),
            "features is 3, but the estimator is fitted to 1",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(mistake, told):
    with pytest.raises(ConfigError, match=told):
        mistake()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"optimizer": Adam()}, "optimizer does not apply to SklearnModel models: the estimator's arguments"),
        (
            {"accumulation_steps": 4},
            "accumulation_steps does not apply to SklearnModel models: use a larger batch_size",
        ),
        (
            {"micro_batch_size": "auto"},
            "micro_batch_size does not apply to SklearnModel models: use a smaller batch",
        ),
        ({"metrics": ["accuracy"]}, "metrics does not apply to SklearnModel models: remove them, or use evaluate"),
    ],
)
def test_what_would_be_ignored_is_refused(given, told):
    data = np.zeros((8, 4)), np.arange(8) % 2
    with pytest.raises(ConfigError, match=told):
        train(model(SGDClassifier(), 4, 2), data, until=Stop(updates=1), **given)


@pytest.mark.parametrize("module", [estimators, models])
def test_the_examples_of_the_docstrings_run(module):
    found = doctest.testmod(module, extraglobs={"edgeasync": edgeasync})
    assert found.failed == 0
    assert found.attempted > 3
