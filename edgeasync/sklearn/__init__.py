"""Trains scikit-learn models on a fleet: `EdgeClassifier`, `EdgeRegressor`, and `model` for its estimators.

This module is imported only on first use and needs the extra `sklearn`.
"""

from edgeasync.sklearn.estimators import EdgeClassifier, EdgeRegressor
from edgeasync.sklearn.models import model

__all__ = ["EdgeClassifier", "EdgeRegressor", "model"]
