"""Model files: ONNX to training graphs, their cache, evaluation, and what is written out."""
