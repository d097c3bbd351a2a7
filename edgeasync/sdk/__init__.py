"""The Python face: `train`, and the run that comes of it. It holds no second implementation of anything."""
