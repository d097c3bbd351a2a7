"""Gradient rules, one per differentiable operator. Importing this package registers the rules."""

from edgeasync.autodiff.rules import (
    convolution,
    einsum,
    elementwise,
    gru,
    linear,
    lstm,
    normalization,
    pooling,
    reduction,
    resampling,
    rnn,
    sampling,
    shaping,
)
from edgeasync.autodiff.rules.registry import INSTEAD, RULES, STOPPING, Rule, Step, TrainingGraphBuilder

__all__ = [
    "INSTEAD",
    "RULES",
    "STOPPING",
    "Rule",
    "Step",
    "TrainingGraphBuilder",
    "convolution",
    "einsum",
    "elementwise",
    "gru",
    "linear",
    "lstm",
    "normalization",
    "pooling",
    "reduction",
    "resampling",
    "rnn",
    "sampling",
    "shaping",
]
