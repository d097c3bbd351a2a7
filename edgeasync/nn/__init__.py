"""A small builder of ONNX models; needs the `onnx` package."""
