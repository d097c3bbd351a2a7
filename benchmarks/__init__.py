"""Measure what edgeasync costs, against baselines in the same run. Results are ratios first."""
