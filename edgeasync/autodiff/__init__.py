"""Differentiates a forward ONNX graph into a training graph (reverse mode).

Needs the `onnx` package.
"""
