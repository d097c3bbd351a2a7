"""torch modules as ONNX models that can be trained, checked against the module's own gradients."""

import copy
import io
import warnings
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from edgeasync.autodiff.build import TrainingGraph, build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import ConfigError, GraphError
from edgeasync.sdk.torch_modules import unwrapped

APART_MAX = 1e-3
"""How far gradients may be apart, as a share of the largest: float32 in another order of sums."""

OPSET = 18
"""The newest that the older exporter writes."""


def to_onnx(
    module: nn.Module, example: Any, *, exporter: Literal["dynamo", "legacy"] = "dynamo", check: bool = True
) -> Any:
    """Return a module as an `onnx.ModelProto` that `train` and `Hub` take, with the module's own names.

    - `example`: a batch of the module's input, two examples or more; only its first axis stays free.
    - `exporter`: torch's newer one, which needs the package onnxscript, or the older one.
    - `check`: build the training graph, and hold its gradients against torch's. A module that draws random
      numbers, as for dropout, has no two equal gradients: of that only the names are checked.

    Parameters that are frozen in torch are in the file like all others: freeze them at the hub, by `[model]
    freeze`. The module is not changed. Needs the extra `hub`. Raises `GraphError` if it cannot be trained as ONNX,
    or has other gradients there, and `ConfigError` for what is no module or no batch.

    >>> import torch
    >>> import edgeasync
    >>> proto = edgeasync.torch.to_onnx(torch.nn.Linear(3, 2), torch.zeros(2, 3), exporter="legacy")
    >>> sorted(entry.name for entry in proto.graph.initializer)
    ['bias', 'weight']
    """
    import onnx  # noqa: PLC0415 - who has torch alone trains without it

    if not isinstance(module, nn.Module):
        raise ConfigError(f"module is {type(module).__name__}; give a torch.nn.Module")
    if exporter not in {"dynamo", "legacy"}:
        raise ConfigError(f"exporter is {exporter!r}; give 'dynamo' or 'legacy'")
    x = torch.as_tensor(example)
    if x.ndim < 2 or len(x) < 2:
        raise ConfigError(f"example has shape {tuple(x.shape)}; give a batch of two examples or more")
    copied = copy.deepcopy(unwrapped(module)).cpu().train()
    content = _export(copied, x, dynamo=exporter == "dynamo")
    if check:
        _check(copied, x, content)
    return onnx.load_model_from_string(content)


def _export(module: nn.Module, x: Tensor, *, dynamo: bool) -> bytes:
    """Export in training mode, unoptimized: only so batch norms, dropouts and names are kept."""
    options: dict[str, Any] = {
        "dynamo": False,
        "training": torch.onnx.TrainingMode.TRAINING,
        "do_constant_folding": False,
        "opset_version": OPSET,
        "dynamic_axes": {"x": {0: "batch"}, "y": {0: "batch"}},
    }
    if dynamo:
        options = {
            "dynamo": True,
            "optimize": False,
            "external_data": False,
            "verbose": False,
            "dynamic_shapes": ({0: torch.export.Dim("batch")},),
        }
    target = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of training mode, which is meant, and of torch's own deprecations
        try:
            torch.onnx.export(module, (x,), target, input_names=["x"], output_names=["y"], **options)
        except ImportError as error:
            raise ConfigError(
                "torch's newer exporter needs onnxscript; pip install onnxscript, or give exporter='legacy'"
            ) from error
    return target.getvalue()


def _check(module: nn.Module, x: Tensor, content: bytes) -> None:
    """Raise `GraphError` unless the training graph has the module's names, and its gradients."""
    frozen = tuple([name for name, tensor in module.named_parameters() if not tensor.requires_grad])
    graph = build_training_graph(content, GraphSettings(loss="mse", freeze=frozen))
    trained = {name for name, tensor in module.named_parameters() if tensor.requires_grad}
    found = {parameter.name for parameter in graph.spec.parameters if parameter.role == "trained"}
    if found != trained:
        name = min(found ^ trained)
        where = "the exported model" if name in found else type(module).__name__
        raise GraphError(
            f"only {where} has a trained array {name!r}; use each parameter in forward, and no others"
        )
    target = torch.from_numpy(np.random.default_rng(0).normal(size=module(x).shape).astype(np.float32))
    ours, again = _gradients(module, x, target), _gradients(module, x, target)
    if any(not torch.allclose(gradient, again[name]) for name, gradient in ours.items()):
        return  # it draws random numbers
    outputs = _run(graph, x, target)
    largest = max(float(gradient.abs().max()) for gradient in ours.values())
    for name, gradient in ours.items():
        apart = float(np.abs(outputs[f"{name}.grad"] - gradient.numpy()).max())
        if not apart <= APART_MAX * max(largest, 1e-12):
            raise GraphError(
                f"the gradient of {name!r} in the exported model is {apart:.2g} off torch's, where the largest is "
                f"{largest:.2g}; train the module itself, by edgeasync.torch.model"
            )


def _gradients(module: nn.Module, x: Tensor, target: Tensor) -> dict[str, Tensor]:
    module = copy.deepcopy(module)
    nn.functional.mse_loss(module(x), target).backward()
    return {
        name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for name, tensor in module.named_parameters()
        if tensor.requires_grad
    }


def _run(graph: TrainingGraph, x: Tensor, target: Tensor) -> dict[str, Any]:
    import onnxruntime  # noqa: PLC0415 - loading it takes a while

    session = onnxruntime.InferenceSession(graph.model, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    feeds = {"x": x.numpy(), "target": target.numpy()} | graph.spec.views(graph.initial.copy())
    return dict(zip(names, session.run(names, feeds), strict=True))
