"""The Python face: `train`, `Hub`, `Agent`, and the runs that come of them. It holds no second implementation."""
