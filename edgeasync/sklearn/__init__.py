"""Train with scikit-learn: `EdgeClassifier`, `EdgeRegressor`, and `model` for its own estimators.

This module requires the extra `sklearn`, and `import edgeasync` does not import it.
"""

from edgeasync.sklearn.estimators import EdgeClassifier, EdgeRegressor
from edgeasync.sklearn.models import model

__all__ = ["EdgeClassifier", "EdgeRegressor", "model"]
