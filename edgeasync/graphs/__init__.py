"""Model files: builds, caches, evaluates and exports training graphs of ONNX models."""
