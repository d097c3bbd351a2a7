"""torch modules as ONNX models that can be trained, checked against the module's own gradients."""

import copy
import io
import json
import re
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn

from edgeasync.autodiff.exporters import CHECKED, KIND, kinds_of_inputs
from edgeasync.autodiff.forward import stops_gradient
from edgeasync.autodiff.selection import FROZEN
from edgeasync.errors import ConfigError, GraphError
from edgeasync.sdk.torch_calls import Call, Grads, call_of, first_line, flat, quiet
from edgeasync.sdk.torch_gradients import ITSELF, check_export
from edgeasync.sdk.torch_modules import unwrapped

OPSET = 18
"""The newest that the older exporter writes."""


def to_onnx(
    module: nn.Module, example: Any, *, exporter: Literal["dynamo", "legacy"] = "dynamo", check: bool = True
) -> Any:
    """Return a module as an `onnx.ModelProto` that `train` and `Hub` take, with the module's own names.

    - `example`: a batch of the module's input, two examples or more; only its first axis stays free. A tuple of
      arrays for a module of several inputs, which then have the names that `forward` gives them, or a dict of
      arrays by these names.
    - `exporter`: torch's newer one, which needs the package onnxscript, or the older one.
    - `check`: build the training graph, and hold its gradients against torch's, at random examples and parameters
      near the module's. Dropout is off meanwhile. A module that draws other random numbers has no two equal
      gradients: of that only the names are checked.

    What `forward` returns in a dict, a tuple or a dataclass becomes several outputs: choose one by `output` of
    `train` and `Hub`. A gradient that torch stops, by `detach` or `torch.no_grad`, is stopped in the file; the
    older exporter cannot say that, so then the check refuses. Parameters frozen in torch stay so, unless `train`
    of the hub names them. The module is not changed. Needs the extra `hub`. Raises `GraphError` if it cannot be
    trained as ONNX, or has other gradients there, and `ConfigError` for what is no module or no batch.

    >>> import torch
    >>> import edgeasync
    >>> proto = edgeasync.torch.to_onnx(torch.nn.Linear(3, 2), torch.zeros(2, 3), exporter="legacy")
    >>> sorted(entry.name for entry in proto.graph.initializer)
    ['bias', 'weight']
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module is {type(module).__name__}; give a torch.nn.Module")
    if exporter not in {"dynamo", "legacy"}:
        raise ConfigError(f"exporter is {exporter!r}; give 'dynamo' or 'legacy'")
    module = copy.deepcopy(unwrapped(module)).cpu().train()
    call = call_of(module, example)
    outputs = _output_names(module, call)
    proto, grads = _export(module, call, outputs, dynamo=exporter == "dynamo")
    _restore(proto, module)
    if check:
        proto.metadata_props.add(key=CHECKED, value="names and gradients")
        check_export(module, call, outputs, proto.SerializeToString(), grads)
    return proto


def _output_names(module: nn.Module, call: Call) -> list[str]:
    """Return a name for each tensor that the module returns, none of which an input or a parameter has."""
    found = flat(quiet(module, lambda copied: call.of(copied.forward, call.tensors)))
    if not found:
        raise ConfigError(f"{type(module).__name__} returns no tensor; return the scores of its examples")
    taken = {*call.names, *module.state_dict(keep_vars=True)}
    names = []
    for name in found:
        while name in taken:
            name += "_out"  # noqa: PLW2901
        taken.add(name)
        names.append(name)
    return names


def _export(module: nn.Module, call: Call, outputs: list[str], *, dynamo: bool) -> tuple[Any, Grads]:
    """Export in training mode, unoptimized: only so batch norms, dropouts and names are kept."""
    import onnx  # noqa: PLC0415 - who has torch alone trains without it

    options: dict[str, Any] = {
        "dynamo": False,
        "training": torch.onnx.TrainingMode.TRAINING,
        "do_constant_folding": False,
        "opset_version": OPSET,
        "dynamic_axes": {name: {0: "batch"} for name in (*call.names, *outputs)},
    }
    if dynamo:
        options = {
            "dynamo": True,
            "optimize": False,
            "external_data": False,
            "verbose": False,
            "dynamic_shapes": ({0: torch.export.Dim("batch")},) * len(call.names),
        }
    grads, copied = Grads(kept=dynamo), copy.deepcopy(module)
    copied.forward = _flattened(copied.forward, call, grads)
    target = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of training mode, which is meant, and of torch's own deprecations
        try:
            torch.onnx.export(
                copied, call.tensors, target, input_names=call.names, output_names=outputs, **options
            )
        except ImportError as error:
            raise ConfigError(
                "torch's newer exporter needs onnxscript; pip install onnxscript, or give exporter='legacy'"
            ) from error
        except Exception as error:
            other = "legacy" if dynamo else "dynamo"
            raise GraphError(
                f"torch cannot export {type(module).__name__} ({_reason(error)}); try exporter={other!r}, or "
                f"{ITSELF}"
            ) from error
    return onnx.load_model_from_string(target.getvalue()), grads


def _reason(error: Exception) -> str:
    """Return what an exporter's error says, without what it says of its own steps and colours."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return _COLOUR.sub("", first_line(error))


_COLOUR = re.compile(r"\x1b\[\d*m")


def _flattened(forward: Any, call: Call, grads: Grads) -> Any:
    """Return a forward of the call's tensors one by one, which returns those of the outputs in a tuple."""

    def flattened(*tensors: Tensor) -> Any:
        with torch.enable_grad(), grads:
            found = list(flat(call.of(forward, tensors)).values())
        if len(found) == 1:
            return found[0]
        # An exporter gives a tensor one name only.
        own = {id(tensor) for tensor in tensors}
        for place, tensor in enumerate(found):
            if id(tensor) in own:
                found[place] = tensor.clone()
            own.add(id(tensor))
        return tuple(found)

    flattened.__signature__ = call.signature  # type: ignore[attr-defined]
    return flattened


def _restore(proto: Any, module: nn.Module) -> None:
    """Give the file what exporters lose: the module's names and first values, and what is not trained in it.

    The newer one calls a tied weight by its last name, and copies the running statistics of a norm that is used
    twice. The older one moves them as it traces.
    """
    from onnx import helper, numpy_helper  # noqa: PLC0415

    held = {entry.name for entry in proto.graph.initializer}
    kept = {entry.name for entry in proto.graph.output}
    copies = [
        node
        for node in proto.graph.node
        if node.op_type == "Identity"
        and node.input[0] in held
        and node.output[0] not in kept
        and not stops_gradient(node)
    ]
    for node in copies:
        proto.graph.node.remove(node)
    first = {id(tensor): name for name, tensor in module.named_parameters()}
    names = {
        name: first[id(tensor)]
        for name, tensor in module.named_parameters(remove_duplicate=False)
        if first[id(tensor)] != name
    }
    names |= {node.output[0]: names.get(node.input[0], node.input[0]) for node in copies}
    for entries in (proto.graph.initializer, proto.graph.value_info):
        for entry in entries:
            entry.name = names.get(entry.name, entry.name)
    for node in proto.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    buffers = {name: tensor for name, tensor in module.named_buffers() if tensor.dtype == torch.float32}
    noted = kinds_of_inputs(proto)
    for entry in proto.graph.initializer:
        if entry.name in buffers:
            entry.CopyFrom(numpy_helper.from_array(buffers[entry.name].numpy(), entry.name))
            if entry.name not in noted:
                info = helper.make_tensor_value_info(entry.name, entry.data_type, entry.dims)
                info.metadata_props.add(key=KIND, value="BUFFER")
                proto.graph.value_info.append(info)
    held = {entry.name for entry in proto.graph.initializer}
    fixed = [name for name, tensor in module.named_parameters() if not tensor.requires_grad]
    if frozen := [name for name in fixed if name in held]:
        proto.metadata_props.add(key=FROZEN, value=json.dumps(frozen))
