"""What edgeasync costs: measurements against baselines taken in the same run. Results are ratios first."""
