"""Measure what edgeasync costs, compared with baselines in the same run."""
