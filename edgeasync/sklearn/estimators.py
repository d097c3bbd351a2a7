"""scikit-learn estimators that train with `edgeasync.train`."""

from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from edgeasync.parameters import Arrays
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.optimizers import SGD, Adam
from edgeasync.policies.policy import Policy
from edgeasync.sdk.stop import Stop
from edgeasync.sdk.train import train
from edgeasync.training.perceptron import Perceptron, scores_of

EPOCHS = 50.0
"""Default number of passes over the data in `fit`."""

OPTIMIZER = Adam(learning_rate=0.01)
"""Default optimizer. Adam adapts its step size, which helps because features and targets may have any scale.
"""

POLICY = Policy(optimizer=(SGD(learning_rate=1.0),), frequency=FixedFrequency(local_steps=8))
"""Default policy. Its exchanges are frequent: they are cheap within a process, and help if there
are few examples.
"""


class _Edge(BaseEstimator):  # type: ignore[misc]
    arrays_: Arrays
    updates_: int | None

    def __init__(
        self,
        hidden: Any = (64,),
        *,
        workers: int = 4,
        until: Stop | None = None,
        optimizer: Any = None,
        batch_size: int = 32,
        policy: Any = None,
        random_state: Any = None,
    ) -> None:
        self.hidden = hidden
        self.workers = workers
        self.until = until
        self.optimizer = optimizer
        self.batch_size = batch_size
        self.policy = policy
        self.random_state = random_state

    def _train(self, x: Any, y: Any, outputs: int, until: Stop, *, further: bool) -> Self:
        seed = int(check_random_state(self.random_state).randint(2**31))
        network = Perceptron((x.shape[1], *self.hidden, outputs), seed)
        if further and hasattr(self, "arrays_"):
            network.parameters = dict(self.arrays_)
        run = train(
            network,
            (x, y),
            workers=min(self.workers, len(x)),
            until=until,
            optimizer=OPTIMIZER if self.optimizer is None else self.optimizer,
            batch_size=self.batch_size,
            policy=POLICY if self.policy is None else self.policy,
            seed=seed,
        )
        self.arrays_ = run.arrays
        self.updates_ = run.updates
        return self

    def _scores(self, x: Any) -> Any:
        check_is_fitted(self)
        x = validate_data(self, x, dtype=np.float64, reset=False)
        # Use float64, so that a prediction does not depend on others in the same call.
        return scores_of({name: array.astype(np.float64) for name, array in self.arrays_.items()}, x)


class EdgeClassifier(ClassifierMixin, _Edge):  # type: ignore[misc]
    """A perceptron classifier, trained with `edgeasync.train`. Labels may have any type.

    - `hidden`: widths of the hidden ReLU layers; an empty tuple gives softmax regression.
    - `workers`, `policy`, `batch_size`, `optimizer`: as for `train`; the default optimizer is
      `Adam(learning_rate=0.01)`.
    - `until`: when `fit` ends, by default after 50 passes over the data.
    - `random_state`: seed of initial values, data split and batches. With one worker, `fit` is
      bit-for-bit reproducible. With several workers, the order of their updates depends on timing,
      so results vary.

    >>> import numpy as np
    >>> from edgeasync.sklearn import EdgeClassifier
    >>> x = np.random.default_rng(0).normal(size=(200, 2))
    >>> EdgeClassifier(random_state=0).fit(x, np.where(x[:, 0] > 0, "right", "left")).predict([[2, 0]])
    array(['right'], dtype='<U5')
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train from scratch."""
        x, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        return self._fit(x, y, self.until or Stop(epochs=EPOCHS), further=False)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:  # noqa: N803
        """Train for one more pass over these examples. The first call needs all `classes`."""
        first = not hasattr(self, "arrays_")
        if first and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        if not first and classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(f"classes differ from those of the last call: {self.classes_}")
        x, y = validate_data(self, X, y, dtype=np.float32, reset=first)
        check_classification_targets(y)
        if first:
            self.classes_ = np.unique(classes)
        return self._fit(x, y, Stop(epochs=1), further=True)

    def _fit(self, x: Any, y: Any, until: Stop, *, further: bool) -> Self:
        if len(self.classes_) < 2:
            raise ValueError("Classifier can't train when only one class is present.")
        if unknown := sorted(set(y.tolist()) - set(self.classes_.tolist())):
            raise ValueError(f"y has labels that are not in classes: {unknown}")
        labels = np.searchsorted(self.classes_, y)
        return self._train(x, labels, len(self.classes_), until, further=further)

    def predict_proba(self, X: Any) -> Any:  # noqa: N803
        """Return the probability of each class, in the order of `classes_`."""
        scores = self._scores(X)
        found = np.exp(scores - scores.max(axis=1, keepdims=True))
        return found / found.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> Any:  # noqa: N803
        """Return the most likely label of each example."""
        found = self._scores(X).argmax(axis=1)
        return self.classes_[found]


class EdgeRegressor(RegressorMixin, _Edge):  # type: ignore[misc]
    """A perceptron regressor, trained with `edgeasync.train`.

    See `EdgeClassifier` for its arguments.

    It minimizes the mean squared error, so scale the targets to a magnitude of about 1.

    >>> import numpy as np
    >>> from edgeasync.sklearn import EdgeRegressor
    >>> x = np.random.default_rng(0).normal(size=(200, 2))
    >>> EdgeRegressor(hidden=(), random_state=0).fit(x, x[:, 0]).score(x, x[:, 0]) > 0.5
    True
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train from scratch."""
        x, y = validate_data(self, X, y, dtype=np.float32, y_numeric=True)
        return self._train(x, y.astype(np.float32), 1, self.until or Stop(epochs=EPOCHS), further=False)

    def partial_fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train for one more pass over these examples."""
        x, y = validate_data(self, X, y, dtype=np.float32, y_numeric=True, reset=not hasattr(self, "arrays_"))
        return self._train(x, y.astype(np.float32), 1, Stop(epochs=1), further=True)

    def predict(self, X: Any) -> Any:  # noqa: N803
        """Return the predicted value of each example."""
        return self._scores(X)[:, 0]
