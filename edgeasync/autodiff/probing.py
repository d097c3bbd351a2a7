"""Opens onnxruntime sessions for the runs that the build of a training graph needs."""

import onnxruntime


def open_session(model: bytes) -> onnxruntime.InferenceSession:
    """Open an onnxruntime session for a model, without optimization and without log output."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
