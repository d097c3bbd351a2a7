"""torch modules as ONNX models that can be trained, checked against the module's own gradients."""

import contextlib
import copy
import io
import json
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn

from edgeasync.autodiff.exporters import CHECKED, EVALUATED, KIND, kinds_of_inputs
from edgeasync.autodiff.forward import open_session
from edgeasync.autodiff.reading import stops_gradient
from edgeasync.autodiff.selection import FROZEN
from edgeasync.errors import ConfigError, EdgeAsyncError, GraphError
from edgeasync.sdk.torch_calls import Call, call_of, flat, quiet
from edgeasync.sdk.torch_gradients import ITSELF, UNCLIPPED, check_export, evaluates_alike, moving
from edgeasync.sdk.torch_modules import copy_of, first_line, hooked, listed, tensors_of, training, unwrapped
from edgeasync.sdk.torch_written import Written, decided

Exporter = Literal["dynamo", "legacy"]

OPSET = 18
"""The newest that the older exporter writes."""


def to_onnx(
    module: nn.Module,
    example: Any,
    *,
    exporter: Exporter = "dynamo",
    train: str | Sequence[str] = (),
    freeze: str | Sequence[str] = (),
    check: bool = True,
) -> Any:
    """Return a module as an `onnx.ModelProto` that `train` and `Hub` take, with the module's own names.

    - `example`: a batch of the module's input, two examples or more; only its first axis stays free. A tuple of
      arrays for a module of several inputs, which then have the names that `forward` gives them, or a dict of
      arrays by these names.
    - `exporter`: torch's newer one, which needs the package onnxscript, or the older one.
    - `train`, `freeze`: which parameters are trained, by the same patterns as `train` and `Hub` take; without them
      those that torch has not frozen.
    - `check`: build the training graph, and hold its gradients and running statistics against torch's, at random
      examples and parameters near the module's. Dropout is off meanwhile, and both draw the same random numbers.

    What `forward` returns in a dict, a tuple or a dataclass becomes several outputs: choose one by `output` of
    `train` and `Hub`. A gradient that torch stops, by `detach`, `torch.no_grad` or `padding_idx`, is stopped in
    the file; the older exporter cannot say that, so then the check refuses. Parameters frozen in torch stay so,
    unless `train` of the hub names them, and so do the statistics of batch norms in evaluation mode. The module is
    not changed. Needs the extra `hub`. Raises `GraphError` if it cannot be trained as ONNX, or trains in another
    way there, and `ConfigError` for what is no module or no batch.

    >>> import torch
    >>> import edgeasync
    >>> proto = edgeasync.torch.to_onnx(torch.nn.Linear(3, 2), torch.zeros(2, 3), exporter="legacy")
    >>> sorted(entry.name for entry in proto.graph.initializer)
    ['bias', 'weight']
    """
    if exporter not in {"dynamo", "legacy"}:
        raise ConfigError(f"exporter is {exporter!r}; give 'dynamo' or 'legacy'")
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
            way = f"give exporter={other!r}, or {ITSELF}"
        said = str(error)
        told = said.replace(ITSELF, way) if ITSELF in said else f"{said}; or {way}"
        raise GraphError(told) from error


def _copy(module: Any) -> nn.Module:
    """Return a copy in training mode, on the CPU; raises `ConfigError` for what cannot be exported or trained."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module is {type(module).__name__}; give a torch.nn.Module")
    module = unwrapped(module)
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            which = f"its part {name!r}" if name else "it"
            raise ConfigError(
                f"the module cannot be read, as {which} is scripted; give that from before torch.jit"
            )
    for name, tensor in tensors_of(module).items():
        if tensor.requires_grad and not tensor.isfinite().all():
            raise ConfigError(f"parameter {name!r} has values that are not finite; give a module with finite ones")
        if tensor.requires_grad and tensor.dtype != torch.float32:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ConfigError(
                f"parameter {name!r} is {kind}, and float32 is what trains; call float() on the module"
            )
    if names := hooked(module):
        raise GraphError(f"the gradient of {listed(names)} has a hook, {UNCLIPPED}")
    return training(copy_of(module).cpu())


def _patterns(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _choose(module: nn.Module, train: list[str], freeze: list[str]) -> None:
    """Freeze and thaw parameters; raises `ConfigError` for a pattern without a match."""
    tensors = tensors_of(module)
    for pattern in (*train, *freeze):
        if not any(fnmatchcase(name, pattern) for name in tensors):
            raise ConfigError(f"no parameter matches {pattern!r}; there are {', '.join(tensors)}")
    for name, tensor in module.named_parameters():
        if train and tensor.is_floating_point():
            tensor.requires_grad_(any(fnmatchcase(name, pattern) for pattern in train))
        if any(fnmatchcase(name, pattern) for pattern in freeze):
            tensor.requires_grad_(False)


def _proto(module: nn.Module, call: Call, outputs: list[str], exporter: Exporter, *, check: bool) -> Any:
    """Return a module as a file, checked against it if that is asked for."""
    if exporter == "legacy":
        _check_branches(module, call)
    proto, written = _export(module, call, outputs, dynamo=exporter == "dynamo")
    moved = moving(module, call)
    statistics = _restore(proto, module, moved)
    if check:
        if lost := sorted(moved - statistics):
            raise GraphError(
                f"forward changes {lost[0]!r}, which no file can; only running statistics of batch norms move in "
                f"training; {ITSELF}"
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
    """Raise `GraphError` if forward branches by what tensors hold: a trace keeps one branch."""
    place = decided(lambda: list(flat(quiet(module, lambda copied: call.of(copied, call.tensors))).values()))
    if place is not None:
        raise GraphError(
            f"{type(module).__name__} decides by what a tensor holds ({place}), and the file would keep a single "
            f"branch; write torch.where, or {ITSELF}"
        )


def _counted(proto: Any, call: Call, written: Written) -> str | None:
    """Return what to say if a file takes no other number of examples than it was exported with."""
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
        f"the exported model takes {rows} examples and no other number, as {size} became a Python number in "
        f"forward; write x.shape[0] and leave it as it is, or {ITSELF}"
    )


def _output_names(module: nn.Module, call: Call) -> list[str]:
    """Return a name for each tensor that the module returns, none of which an input or a parameter has.

    Raises `ConfigError` if forward does not take the example, or not twice as many examples.
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
                f"{type(module).__name__} does not take example ({first_line(error)}); give what forward takes"
            ) from error
    if reason is not None:
        raise ConfigError(
            f"{type(module).__name__} takes example, but not twice as many ({first_line(reason)}); the first axis "
            "of an input is the batch, of any size"
        )
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


def _export(module: nn.Module, call: Call, outputs: list[str], *, dynamo: bool) -> tuple[Any, Written]:
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
                "torch's newer exporter needs onnxscript; pip install onnxscript, or give exporter='legacy'"
            ) from error
        except Exception as error:
            way = f"{_UNPACKED}, or {ITSELF}" if written.packed else ITSELF
            raise GraphError(f"torch cannot export {type(module).__name__}{_reason(error)}; {way}") from error
    if "padding_idx" in written.lost:
        raise GraphError(f"an embedding has a padding_idx, and {written.advice}{ITSELF}")
    return onnx.load_model_from_string(target.getvalue()), written


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep quiet what torch says of training mode, which is meant, and of its own deprecations and steps."""
    loggers = logging.root.manager.loggerDict.items()
    handlers = [
        handler for name, one in loggers if name.startswith("torch") for handler in getattr(one, "handlers", ())
    ]
    levels, said = [handler.level for handler in handlers], io.StringIO()
    for handler in handlers:
        handler.setLevel(logging.CRITICAL)
    # The older exporter prints a graph that it cannot write, in C++: past the redirected outputs.
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
    """Return what an exporter's error says in brackets, without what it says of its own steps, colours and C++."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    said = _OWN.sub("", first_line(error)).strip(" .,:")
    return "" if _NATIVE.search(said) else f" ({said})"


_UNPACKED = (
    "leave out pack_padded_sequence, and take the last step of each example by "
    "h[torch.arange(h.shape[0]), length - 1]"
)

_OWN = re.compile(r"\x1b\[\d*m|\. Please feel free to .*|\s*\[Caused by the value .*|^Unsupported: ")
"""Colours, where to report an error, and the graph around a node: of no use to who exports."""

_NATIVE = re.compile(r"std::|::_M_|\.(cpp|cc|h):\d|INTERNAL ASSERT|C\+\+")
"""Words that only the authors of torch can read."""


def _own(module: nn.Module, call: Call) -> set[int]:
    """Return the places of outputs that are parameters or buffers: they have names already."""

    def use(copied: nn.Module) -> set[int]:
        held = {id(tensor) for tensor in (*copied.parameters(), *copied.buffers())}
        found = flat(call.of(copied, call.tensors)).values()
        return {place for place, tensor in enumerate(found) if id(tensor) in held}

    places: set[int] = quiet(module, use)
    return places


def _flattened(forward: Any, call: Call, written: Written, own: set[int]) -> Any:
    """Return a forward of the call's tensors one by one, which returns those of the outputs in a tuple.

    `own` are the places of outputs to copy.
    """

    def flattened(*tensors: Tensor) -> Any:
        with torch.enable_grad(), written:
            found = list(flat(call.of(forward, tensors)).values())
        # An exporter gives a tensor one name only.
        named = {id(tensor) for tensor in tensors}
        for place, tensor in enumerate(found):
            if place in own or id(tensor) in named:
                found[place] = tensor.clone()
            named.add(id(tensor))
        return tuple(found) if found[1:] else found[0]

    flattened.__signature__ = call.signature  # type: ignore[attr-defined]
    return flattened


def _restore(proto: Any, module: nn.Module, moved: set[str]) -> set[str]:
    """Give the file what exporters lose: the module's names and first values, and what is not trained in it.

    Returns the names of the running statistics of its batch norms; `moved` is what forward changes.
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
