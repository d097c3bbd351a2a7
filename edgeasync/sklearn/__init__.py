"""scikit-learn on a fleet: `EdgeClassifier` and `EdgeRegressor`, and `model` for estimators of its own.

None of this is imported unless it is asked for; it needs the extra `sklearn`.
"""

from edgeasync.sklearn.estimators import EdgeClassifier, EdgeRegressor
from edgeasync.sklearn.models import model

__all__ = ["EdgeClassifier", "EdgeRegressor", "model"]
