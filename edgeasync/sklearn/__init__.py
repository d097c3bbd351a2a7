"""Trains scikit-learn's own estimators on a fleet, and provides estimators of edgeasync.

This module is imported only on first use and needs the extra `sklearn`.
"""

from edgeasync.sklearn.estimators import EdgeClassifier, EdgeRegressor
from edgeasync.sklearn.models import model

__all__ = ["EdgeClassifier", "EdgeRegressor", "model"]
