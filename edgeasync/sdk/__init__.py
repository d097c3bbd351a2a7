"""The Python API: `train`, `Hub`, `Agent` and runs, built on the same parts as the daemons."""
