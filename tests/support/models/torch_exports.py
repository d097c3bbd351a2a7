"""Models of torch, exported in every way it knows, and their training graphs beside torch's own gradients."""

import copy
import io

import numpy as np
import onnxruntime
import torch

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings

torch.set_num_threads(1)

EXPORTS = {
    "old, training": {"dynamo": False, "training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False},
    "old, folded": {"dynamo": False, "training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": True},
    "old, evaluation": {"dynamo": False, "training": torch.onnx.TrainingMode.EVAL},
    "old, preserving": {"dynamo": False, "training": torch.onnx.TrainingMode.PRESERVE},
    "new": {"dynamo": True, "optimize": False},
    "new, optimized": {"dynamo": True},
    "new, of evaluation": {"dynamo": True, "optimize": False, "evaluated": True},
    "new, optimized, of evaluation": {"dynamo": True, "evaluated": True},
}


def export(model, x, *, free=True, evaluated=False, **options):
    """Return a copy of the model, serialized."""
    model = copy.deepcopy(model).train(not evaluated and options.get("training") != torch.onnx.TrainingMode.EVAL)
    if options["dynamo"]:
        options |= {"verbose": False, "external_data": False}
        if free:
            options["dynamic_shapes"] = ({0: torch.export.Dim("batch")},)
    else:
        options["opset_version"] = 18
        if free:
            options["dynamic_axes"] = {"x": {0: "batch"}, "y": {0: "batch"}}
    target = io.BytesIO()
    torch.onnx.export(model, (x,), target, input_names=["x"], output_names=["y"], **options)
    return target.getvalue()


def open_graph(graph, threads=1):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(graph.model, options, ["CPUExecutionProvider"])


class Stepper:
    """A training graph with its parameters as one vector and views of it."""

    def __init__(self, data, loss, threads=1, **settings):
        self.graph = build_training_graph(data, GraphSettings(loss=loss, **settings))
        self.vector = self.graph.initial.copy()
        self.values = self.graph.spec.views(self.vector)
        self._session = open_graph(self.graph, threads)
        self._names = [entry.name for entry in self._session.get_outputs()]

    def __call__(self, x, target):
        feeds = {"x": x.numpy(), "target": target.numpy()} | self.values
        return dict(zip(self._names, self._session.run(self._names, feeds), strict=True))


LOSSES = {"cross_entropy": torch.nn.functional.cross_entropy, "mse": torch.nn.functional.mse_loss}


def torch_step(model, x, target, loss, dtype=torch.float64):
    """Return loss, gradients by parameter, and running statistics after one step of torch in training mode."""
    model = copy.deepcopy(model).to(dtype).train()
    if x.is_floating_point():
        x = x.to(dtype)
    if target.is_floating_point():
        target = target.to(dtype)
    value = LOSSES[loss](model(x), target)
    value.backward()
    gradients = {name: entry.grad.numpy() for name, entry in model.named_parameters() if entry.grad is not None}
    return float(value.detach()), gradients, {name: entry.numpy() for name, entry in model.named_buffers()}


def distance(found, expected, floor):
    """Return how far two arrays are apart, relative to the largest value of the second, or to `floor`."""
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), floor, 1e-12))
