"""Exports torch modules as trainable ONNX models, checked against the module's own gradients."""

import contextlib
import copy
import io
import json
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn

from edgeasync.autodiff.exporters import CHECKED, EVALUATED, KIND, kinds_of_inputs
from edgeasync.autodiff.probing import open_session
from edgeasync.autodiff.reading import stops_gradient
from edgeasync.autodiff.selection import FROZEN
from edgeasync.errors import ConfigError, EdgeAsyncError, GraphError
from edgeasync.parameters import matches
from edgeasync.sdk.torch_calls import Call, call_of, flat, quiet
from edgeasync.sdk.torch_gradients import ITSELF, UNCLIPPED, check_export, evaluates_alike, moving
from edgeasync.sdk.torch_modules import copy_of, first_line, hooked, listed, tensors_of, training, unwrapped
from edgeasync.sdk.torch_written import Written, decided

Exporter = Literal["dynamo", "legacy"]

OPSET = 18
"""The newest opset that the legacy exporter writes."""


def to_onnx(
    module: nn.Module,
    example: Any,
    *,
    exporter: Exporter = "dynamo",
    train: str | Sequence[str] = (),
    freeze: str | Sequence[str] = (),
    check: bool = True,
) -> Any:
    """Export a module as an `onnx.ModelProto` for `train` and `Hub`, with the module's own names.

    - `example`: a batch of at least two examples; only the first axis is dynamic. For a module with
      several inputs, pass a tuple of arrays in the order of `forward`'s parameters, or a dict of
      arrays with the parameters' names as keys.
    - `exporter`: "dynamo", torch's newer exporter, which needs the package onnxscript; or "legacy".
    - `train`, `freeze`: patterns of parameters to train or freeze, as for `train` and `Hub`. By
      default, the parameters that are not frozen in torch are trained.
    - `check`: whether to build the training graph, and to compare its gradients and running
      statistics with torch's. The check uses random examples, and parameters near the module's. It
      disables dropout, and makes torch and the graph draw the same random numbers.

    If `forward` returns a dict, a tuple or a dataclass, the file has several outputs; select one
    with the argument `output` of `train` and `Hub`. Gradients stopped by `detach`, `torch.no_grad`
    or `padding_idx` are also stopped in the file. The legacy exporter cannot express this, so the
    check fails for such modules. Parameters that are frozen in torch, and the statistics of batch
    norms in evaluation mode, stay frozen unless the hub's `train` matches their names. The module
    is not changed.

    Needs the extra `hub`. Raises `GraphError` if the module cannot be trained as ONNX or would
    train differently there, and `ConfigError` for an invalid module or example.

    >>> import torch
    >>> import edgeasync
    >>> proto = edgeasync.torch.to_onnx(torch.nn.Linear(3, 2), torch.zeros(2, 3), exporter="legacy")
    >>> sorted(entry.name for entry in proto.graph.initializer)
    ['bias', 'weight']
    """
    if exporter not in {"dynamo", "legacy"}:
        raise ConfigError(f"exporter is {exporter!r}; choose 'dynamo' or 'legacy'")
    module = _copy(module)
    _choose(module, _patterns(train), _patterns(freeze))
    call = call_of(module, example)
    outputs = _output_names(module, call)
    try:
        return _proto(module, call, outputs, exporter, check=check)
    except GraphError as error:
        other: Exporter = "legacy" if exporter == "dynamo" else "dynamo"
        try:
            _proto(module, call, outputs, other, check=True)
        except EdgeAsyncError:
            way = ITSELF
        else:
            way = f"use exporter={other!r}, or {ITSELF}"
        said = str(error)
        told = said.replace(ITSELF, way) if ITSELF in said else f"{said}; or {way}"
        raise GraphError(told) from error


def _copy(module: Any) -> nn.Module:
    """Return a CPU copy in training mode; raises `ConfigError` for an unsupported module."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module is {type(module).__name__}; pass a torch.nn.Module")
    module = unwrapped(module)
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            which = f"its part {name!r}" if name else "it"
            raise ConfigError(
                f"the module cannot be exported, because {which} is scripted; pass the module before torch.jit"
            )
    for name, tensor in tensors_of(module).items():
        if tensor.requires_grad and not tensor.isfinite().all():
            raise ConfigError(
                f"parameter {name!r} contains values that are not finite; correct them before the export"
            )
        if tensor.requires_grad and tensor.dtype != torch.float32:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ConfigError(
                f"parameter {name!r} is {kind}, but training requires float32; call float() on the module"
            )
    if names := hooked(module):
        raise GraphError(f"the gradient of {listed(names)} has a hook, {UNCLIPPED}")
    return training(copy_of(module).cpu())


def _patterns(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _choose(module: nn.Module, train: list[str], freeze: list[str]) -> None:
    """Freeze and unfreeze parameters; raises `ConfigError` for a pattern without a match."""
    tensors = tensors_of(module)
    for pattern in (*train, *freeze):
        if not any(matches(name, pattern) for name in tensors):
            raise ConfigError(f"no parameter matches {pattern!r}; the parameters are {', '.join(tensors)}")
    for name, tensor in module.named_parameters():
        if train and tensor.is_floating_point():
            tensor.requires_grad_(any(matches(name, pattern) for pattern in train))
        if any(matches(name, pattern) for pattern in freeze):
            tensor.requires_grad_(False)


def _proto(module: nn.Module, call: Call, outputs: list[str], exporter: Exporter, *, check: bool) -> Any:
    """Export a module; if `check` is set, compare the exported model with the module."""
    if exporter == "legacy":
        _check_branches(module, call)
    proto, written = _export(module, call, outputs, dynamo=exporter == "dynamo")
    moved = moving(module, call)
    statistics = _restore(proto, module, moved)
    if check:
        if lost := sorted(moved - statistics):
            raise GraphError(
                f"forward changes {lost[0]!r}, but an exported model can update only the running statistics of "
                f"batch norms; {ITSELF}"
            )
        proto.metadata_props.add(key=CHECKED, value="names and gradients")
        try:
            check_export(module, call, outputs, proto.SerializeToString(), written)
        except GraphError as error:
            if (told := _counted(proto, call, written)) is not None:
                raise GraphError(told) from error
            raise
        if not evaluates_alike(module, call, proto.SerializeToString()):
            proto.metadata_props.add(key=EVALUATED, value="differs from the module")
    return proto


def _check_branches(module: nn.Module, call: Call) -> None:
    """Raise `GraphError` if `forward` branches on tensor values; a trace has only one branch."""
    place = decided(lambda: list(flat(quiet(module, lambda copied: call.of(copied, call.tensors))).values()))
    if place is not None:
        raise GraphError(
            f"{type(module).__name__} branches on the values of a tensor ({place}), and the file would keep a "
            f"single branch; use torch.where, or {ITSELF}"
        )


def _counted(proto: Any, call: Call, written: Written) -> str | None:
    """Return an error message if the file accepts only the example's batch size."""
    rows = len(call.tensors[0])
    taken = []
    for times in (1, 2):
        feeds = {
            name: torch.cat([tensor] * times).numpy()
            for name, tensor in zip(call.names, call.tensors, strict=True)
        }
        try:
            open_session(proto.SerializeToString()).run(None, feeds)
        except Exception:  # noqa: BLE001 - of onnxruntime
            taken.append(False)
        else:
            taken.append(True)
    if taken != [True, False]:
        return None
    size = "len(x)" if written.counted else "a size of the batch"
    return (
        f"the exported model accepts only {rows} examples, because {size} became a Python number in "
        f"forward; use x.shape[0] directly, or {ITSELF}"
    )


def _output_names(module: nn.Module, call: Call) -> list[str]:
    """Name each output tensor, without reusing a name of an input or parameter.

    Raises `ConfigError` if `forward` rejects the example, or a batch of twice its size.
    """
    found: dict[str, Tensor] = {}
    reason: Exception | None = None
    for times in (2, 1):
        batch = tuple([torch.cat([tensor] * times) for tensor in call.tensors])
        try:
            found = flat(quiet(module, partial(call.of, tensors=batch)))
        except Exception as error:
            if times == 2:
                reason = error
                continue
            raise ConfigError(
                f"{type(module).__name__} rejects example ({first_line(error)}); pass a valid input"
            ) from error
    if reason is not None:
        raise ConfigError(
            f"{type(module).__name__} accepts example, but not a batch of twice its size ({first_line(reason)}); "
            "the first axis of an input must be the batch, of any size"
        )
    if not found:
        raise ConfigError(f"{type(module).__name__} returns no tensor; return one, such as scores of the examples")
    taken = {*call.names, *module.state_dict(keep_vars=True)}
    names = []
    for name in found:
        while name in taken:
            name += "_out"  # noqa: PLW2901
        taken.add(name)
        names.append(name)
    return names


def _export(module: nn.Module, call: Call, outputs: list[str], *, dynamo: bool) -> tuple[Any, Written]:
    """Export in training mode without optimizations, to preserve batch norms, dropouts and names."""
    import onnx  # noqa: PLC0415 - not needed to train with torch alone

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
    written, copied = Written(kept=dynamo), copy.deepcopy(module)
    copied.forward = _flattened(copied.forward, call, written, _own(module, call))
    target = io.BytesIO()
    with _silent():
        try:
            torch.onnx.export(
                copied, call.tensors, target, input_names=call.names, output_names=outputs, **options
            )
        except ImportError as error:
            raise ConfigError(
                "torch's newer exporter needs onnxscript; run pip install onnxscript, or use exporter='legacy'"
            ) from error
        except Exception as error:
            way = f"{_UNPACKED}, or {ITSELF}" if written.packed else ITSELF
            raise GraphError(f"torch cannot export {type(module).__name__}{_reason(error)}; {way}") from error
    if "padding_idx" in written.lost:
        raise GraphError(f"an embedding has a padding_idx, and {written.advice}{ITSELF}")
    return onnx.load_model_from_string(target.getvalue()), written


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Suppress torch's progress output, and its warnings about training mode and deprecations."""
    loggers = logging.root.manager.loggerDict.items()
    handlers = [
        handler for name, one in loggers if name.startswith("torch") for handler in getattr(one, "handlers", ())
    ]
    levels, said = [handler.level for handler in handlers], io.StringIO()
    for handler in handlers:
        handler.setLevel(logging.CRITICAL)
    # The legacy exporter prints a failing graph from C++, bypassing the redirected outputs.
    printed = mock.patch.object(torch._C, "_jit_onnx_log")  # noqa: SLF001
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            printed,
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)


def _reason(error: Exception) -> str:
    """Return an exporter's error message in brackets, without internal steps and C++ details."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    said = _OWN.sub("", first_line(error)).strip(" .,:")
    return "" if _NATIVE.search(said) else f" ({said})"


_UNPACKED = (
    "remove pack_padded_sequence, and select the last step of each example with "
    "h[torch.arange(h.shape[0]), length - 1]"
)

_OWN = re.compile(r"\x1b\[\d*m|\. Please feel free to .*|\s*\[Caused by the value .*|^Unsupported: ")
"""Parts of error messages that do not help the user: colours, bug report advice, graph context."""

_NATIVE = re.compile(r"std::|::_M_|\.(cpp|cc|h):\d|INTERNAL ASSERT|C\+\+")
"""Words by which an error message is recognized as internal to torch."""


def _own(module: nn.Module, call: Call) -> set[int]:
    """Return the indices of outputs that are parameters or buffers, which already have names."""

    def use(copied: nn.Module) -> set[int]:
        held = {id(tensor) for tensor in (*copied.parameters(), *copied.buffers())}
        found = flat(call.of(copied, call.tensors)).values()
        return {place for place, tensor in enumerate(found) if id(tensor) in held}

    places: set[int] = quiet(module, use)
    return places


def _flattened(forward: Any, call: Call, written: Written, own: set[int]) -> Any:
    """Wrap `forward` as a function of separate tensors that returns a tensor or a tuple of tensors.

    `own` contains the indices of outputs that must be copied.
    """

    def flattened(*tensors: Tensor) -> Any:
        with torch.enable_grad(), written:
            found = list(flat(call.of(forward, tensors)).values())
        # An exporter supports only one name per tensor, so copy tensors that have one.
        named = {id(tensor) for tensor in tensors}
        for place, tensor in enumerate(found):
            if place in own or id(tensor) in named:
                found[place] = tensor.clone()
            named.add(id(tensor))
        return tuple(found) if found[1:] else found[0]

    flattened.__signature__ = call.signature  # type: ignore[attr-defined]
    return flattened


def _restore(proto: Any, module: nn.Module, moved: set[str]) -> set[str]:
    """Restore names, initial values and frozen tensors that the exporters do not preserve.

    Return the names of the batch norms' running statistics. `moved` contains the names of the
    tensors that `forward` changes. The newer exporter uses the last name of a tied weight, and
    copies the running statistics of a norm that is used twice. The legacy exporter changes running
    statistics during tracing.
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
    single = {name: tensor for name, tensor in module.named_parameters() if not tensor.ndim}
    noted = kinds_of_inputs(proto)
    for entry in proto.graph.initializer:
        if entry.name in buffers:
            entry.CopyFrom(numpy_helper.from_array(buffers[entry.name].numpy(), entry.name))
        if entry.name in {*buffers, *single} and entry.name not in noted:
            info = helper.make_tensor_value_info(entry.name, entry.data_type, entry.dims)
            info.metadata_props.add(key=KIND, value="BUFFER" if entry.name in buffers else "PARAMETER")
            proto.graph.value_info.append(info)
    held = {entry.name for entry in proto.graph.initializer}
    norms = [node for node in proto.graph.node if node.op_type == "BatchNormalization"]
    statistics = {name for node in norms for name in node.input[3:5]}
    fixed = [name for name, tensor in module.named_parameters() if not tensor.requires_grad]
    fixed += [name for name in buffers if name in statistics - moved]
    if frozen := [name for name in fixed if name in held]:
        proto.metadata_props.add(key=FROZEN, value=json.dumps(frozen))
    return statistics
