"""scikit-learn estimators as models for `train`, `Hub` and `Agent`."""

import copy
from typing import Any

import numpy as np
from sklearn.base import clone, is_classifier
from sklearn.linear_model import SGDClassifier, SGDRegressor
from sklearn.metrics import log_loss, mean_squared_error
from sklearn.neural_network import MLPClassifier, MLPRegressor

from edgeasync.data.dataset import Dataset, batches
from edgeasync.errors import ConfigError
from edgeasync.parameters import Arrays, Parameter, ParameterSpec, Vector
from edgeasync.sdk.adapted import Adapted
from edgeasync.sdk.models import Prepared
from edgeasync.training.evaluation import EvaluationResult, Evaluator
from edgeasync.training.plan import LocalTraining
from edgeasync.training.trainer import StepResult

KINDS = (SGDClassifier, SGDRegressor, MLPClassifier, MLPRegressor)


def model(estimator: Any, features: int, classes: int | None = None) -> "SklearnModel":
    """Return an estimator as a model for `train`, `Hub` and `Agent`. The estimator is copied, not changed.

    - `estimator`: an `SGDClassifier`, `SGDRegressor`, `MLPClassifier` or `MLPRegressor`. If it is
      fitted, training starts with its parameters, otherwise with scikit-learn's initial values.
    - `features`: the number of features per example.
    - `classes`: the number of classes, for a classifier; labels are numbers from 0.

    Each local step calls the estimator's own `partial_fit` on a batch, with its own loss, learning
    rate and penalty. The estimator's step count and Adam state stay on the device.

    >>> import numpy as np
    >>> from sklearn.linear_model import SGDClassifier
    >>> import edgeasync
    >>> x = np.random.default_rng(0).normal(size=(200, 2))
    >>> model = edgeasync.sklearn.model(SGDClassifier(), features=2, classes=2)
    >>> run = edgeasync.train(model, (x, x[:, 0] > 0), until=edgeasync.Stop(updates=40))
    >>> run.model
    SGDClassifier()
    """
    return SklearnModel(estimator, features, classes)


class SklearnModel(Adapted):
    """An estimator that devices train, created by `model`."""

    optimizer_is = "the estimator's arguments select its optimizer"

    def __init__(self, estimator: Any, features: int, classes: int | None) -> None:
        name = type(estimator).__name__
        if not isinstance(estimator, KINDS):
            raise ConfigError(f"estimator is {name}; pass one of {', '.join(kind.__name__ for kind in KINDS)}")
        if is_classifier(estimator) != (classes is not None):
            raise ConfigError(
                f"{name}: pass classes=N, the number of classes, for a classifier, and omit it for a regressor"
            )
        if getattr(estimator, "average", False) or getattr(estimator, "early_stopping", False):
            raise ConfigError(f"{name}: average and early_stopping work only in one process; remove them")
        self._classes = None if classes is None else np.arange(classes)
        self._estimator = _begun(estimator, features, self._classes)
        arrays = _arrays(self._estimator)
        self.spec = ParameterSpec(tuple([Parameter(name, array.shape) for name, array in arrays.items()]))

    def prepare(self, local: LocalTraining) -> Prepared:
        """Return this model in the form that `train` and agents need."""
        return Prepared(
            spec=self.spec,
            initial=self.spec.flatten(
                {name: array.astype(np.float32) for name, array in _arrays(self._estimator).items()}
            ),
            make_trainer=lambda data, seed, _: SklearnTrainer(self, data, local, seed),
            make_evaluator=self._evaluator,
            restore=self.fitted,
        )

    def fitted(self, arrays: Arrays) -> Any:
        """Return the estimator with these arrays as its parameters."""
        estimator = copy.deepcopy(self._estimator)
        _write(estimator, arrays)
        return estimator

    def _evaluator(self, data: Dataset) -> Evaluator:
        x, classes = np.asarray(data.x).reshape(len(data), -1), self._classes

        def evaluate(parameters: Vector) -> EvaluationResult:
            estimator = self.fitted(self.spec.views(parameters))
            if classes is None:
                return EvaluationResult(float(mean_squared_error(data.y, estimator.predict(x))), None, len(data))
            right = float((estimator.predict(x).reshape(data.y.shape) == data.y).mean())
            if not hasattr(estimator, "predict_proba"):  # for example a support vector machine
                return EvaluationResult(1.0 - right, right, len(data))
            return EvaluationResult(
                float(log_loss(data.y, estimator.predict_proba(x), labels=classes)), right, len(data)
            )

        return evaluate


class SklearnTrainer:
    """Trains with the `partial_fit` of an estimator."""

    def __init__(self, model: SklearnModel, data: Dataset, local: LocalTraining, seed: int) -> None:
        self.spec = model.spec
        self._estimator = copy.deepcopy(model._estimator)  # noqa: SLF001 - the model's own trainer
        self._stream = batches(Dataset(data.x, data.y), local.batch_size, seed)  # several inputs raise an error
        self._keeps = local.keep_optimizer_state
        self._vector: Vector | None = None

    def begin(self, parameters: Vector) -> None:
        """Start an assignment: train this vector in place from now on."""
        self.spec.check(parameters)
        self._vector = parameters
        _write(self._estimator, self.spec.views(parameters))
        if not self._keeps:
            self.reset()

    def reset(self) -> None:
        """Reset the optimizer's state."""
        vars(self._estimator).pop("_optimizer", None)  # a perceptron's Adam; the next step creates a new one

    def step(self) -> StepResult:
        """Call `partial_fit` on one batch."""
        assert self._vector is not None
        x, y = next(self._stream)
        self._estimator.partial_fit(x.reshape(len(x), -1), y)
        trained = _arrays(self._estimator)
        for name, array in self.spec.views(self._vector).items():
            array[...] = trained[name]
        return StepResult(getattr(self._estimator, "loss_", None), len(y))


def _begun(estimator: Any, features: int, classes: Any) -> Any:
    """Return a copy of the estimator with allocated arrays."""
    if hasattr(estimator, "n_features_in_"):
        if estimator.n_features_in_ != features:
            raise ConfigError(
                f"features is {features}, but the estimator is fitted to {estimator.n_features_in_} features; "
                "pass that number, or an estimator that is not fitted"
            )
        return copy.deepcopy(estimator)
    begun = clone(estimator)
    x = np.zeros((1 if classes is None else len(classes), features), np.float32)
    if classes is None:
        begun.partial_fit(x, np.zeros(1))
    else:
        begun.partial_fit(x, classes, classes=classes)
    if hasattr(begun, "coef_"):
        begun.coef_[...], begun.intercept_[...] = 0.0, 0.0
    return begun


def _arrays(estimator: Any) -> dict[str, Any]:
    if hasattr(estimator, "coef_"):
        return {"coef_": estimator.coef_, "intercept_": estimator.intercept_}
    found = {f"coefs_.{number}": array for number, array in enumerate(estimator.coefs_)}
    return found | {f"intercepts_.{number}": array for number, array in enumerate(estimator.intercepts_)}


def _write(estimator: Any, arrays: Arrays) -> None:
    for name, array in _arrays(estimator).items():
        array[...] = arrays[name]
