"""Trains scikit-learn models on a fleet, with its estimators or those of edgeasync.

This module is imported only on first use and needs the extra `sklearn`.
"""

from edgeasync.sklearn.estimators import EdgeClassifier, EdgeRegressor
from edgeasync.sklearn.models import model

__all__ = ["EdgeClassifier", "EdgeRegressor", "model"]
