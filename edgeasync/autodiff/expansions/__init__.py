"""Equivalents of operators without a gradient rule. Importing this package registers them."""

from edgeasync.autodiff.expansions import attention, elementwise, linear, normalization, reduction
from edgeasync.autodiff.expansions.expand import expand
from edgeasync.autodiff.expansions.registry import EXPANSIONS

__all__ = ["EXPANSIONS", "attention", "elementwise", "expand", "linear", "normalization", "reduction"]
