"""Reverse-mode differentiation of a forward ONNX graph into a training graph; needs the `onnx` package."""
