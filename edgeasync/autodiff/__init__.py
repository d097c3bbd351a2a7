"""Converts a forward ONNX graph to a training graph, by reverse-mode differentiation.

Needs the `onnx` package.
"""
