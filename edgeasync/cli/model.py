"""`edgeasync model` and `edgeasync export`: ONNX files in, ONNX files out; nothing runs a hub here."""

from pathlib import Path
from typing import Any

import msgspec
import safetensors.numpy
from rich.console import Console
from rich.table import Table

from edgeasync.cli.output import Printer
from edgeasync.config import convert
from edgeasync.errors import ConfigError, GraphError
from edgeasync.runtime.files import MODEL_FILE, read_arrays, replace_file
from edgeasync.runtime.graph_model import FORWARD_FILE, HubGraph, OnnxModel, load_graph

VALUES_SUFFIX = ".safetensors"


def build_model(forward: Path, flags: dict[str, Any], out: Path, printer: Printer) -> None:
    """Write the training graph of a forward model, and beside it the values that training begins with."""
    built = _load(forward, flags)
    if built.forward is None:
        raise ConfigError(f"{forward}: is a training graph already; give the forward model")
    values = out.with_suffix(VALUES_SUFFIX)
    if out.suffix == VALUES_SUFFIX:
        raise ConfigError(f"--out {out}: the values go to a file of that name; write --out training.onnx")
    replace_file(out, built.graph)
    replace_file(values, safetensors.numpy.save(dict(built.spec.views(built.initial))))
    result = {
        "graph": str(out),
        "values": str(values),
        "parameters": built.spec.trained_length,
        "statistics": built.spec.length - built.spec.trained_length,
        "bytes": len(built.graph),
    }
    if printer.json:
        printer.object(result)
    else:
        printer.line(f"{out}: trains {result['parameters']} parameters, {result['bytes']} bytes")
        printer.line(f"{values}: the values it begins with")


def inspect_model(path: Path, flags: dict[str, Any], batch_size: int, printer: Printer) -> None:
    """Print what a model trains and what one step costs."""
    from edgeasync.autodiff.inspection import inspect_graph  # noqa: PLC0415 - needs onnx

    built = _load(path, flags)
    found = inspect_graph(built.graph, built.spec, batch_size)
    arrays = [
        {"name": parameter.name, "shape": list(parameter.shape), "role": parameter.role}
        for parameter in built.spec.parameters
    ]
    if printer.json:
        printer.object(msgspec.to_builtins(found) | {"arrays": arrays})
        return
    table = Table("parameter", "shape", "values", "role", box=None)
    for parameter in built.spec.parameters:
        shape = " x ".join(map(str, parameter.shape)) or "scalar"
        table.add_row(parameter.name, shape, f"{parameter.size:,}", parameter.role)
    Console().print(table)
    for name, dims in found.inputs.items():
        if name not in {parameter.name for parameter in built.spec.parameters}:
            printer.line(f"input {name}: {' x '.join(map(str, dims))}")
    metrics = [name for name in found.outputs if not name.endswith((".grad", ".new"))]
    printer.line(f"outputs besides gradients: {', '.join(metrics)}")
    printer.line(f"{found.parameters:,} trained, {found.statistics:,} running statistics, {found.frozen:,} fixed")
    printer.line(
        f"{found.nodes} nodes: " + ", ".join(f"{count} {name}" for name, count in found.operators.items())
    )
    printer.line(
        f"a step of {batch_size} examples: {found.floating_point_operations / 1e6:,.1f} million operations, "
        f"{found.memory_bytes / 2**20:,.1f} MiB of tensors"
    )


def check_model(path: Path, flags: dict[str, Any], batch_size: int, printer: Printer) -> None:
    """Hold the gradients against differences of the loss; raises `GraphError` if one is wrong."""
    from edgeasync.autodiff.check import check_gradients  # noqa: PLC0415 - needs onnx

    built = _load(path, flags)
    checks = check_gradients(built.graph, built.spec, built.initial, batch_size=batch_size)
    failed = [check for check in checks if not check.passed]
    if printer.json:
        printer.object({"passed": not failed, "gradients": [msgspec.to_builtins(check) for check in checks]})
    else:
        table = Table("gradient of", "slope", "difference", "apart", "", box=None)
        for check in checks:
            verdict = "ok" if check.passed else "WRONG"
            table.add_row(
                check.name, f"{check.slope:.3e}", f"{check.difference:.3e}", f"{check.error:.2%}", verdict
            )
        Console().print(table)
    if failed:
        raise GraphError(
            f"{path}: the gradient of {failed[0].name!r} and {len(failed) - 1} more differ from the loss's slope; "
            "if the loss is smooth there, this is a defect of edgeasync: please report the model"
        )


def export_run(run: Path, forward: Path | None, out: Path, printer: Printer) -> None:
    """Write the trained model of a run as an inference file."""
    try:
        from edgeasync.autodiff.export import export_model  # noqa: PLC0415 - needs onnx
    except ModuleNotFoundError as error:
        raise ConfigError("export needs the package onnx: pip install 'edgeasync[hub]'") from error
    source, trained = forward or run / FORWARD_FILE, run / MODEL_FILE
    content = _read(source, "give --model FILE.onnx, the forward model that was trained")
    arrays = read_arrays(trained)
    replace_file(out, export_model(content, arrays))
    if printer.json:
        printer.object({"model": str(out), "arrays": len(arrays)})
    else:
        printer.line(f"{out}: {len(arrays)} trained arrays of {trained}")


def _load(path: Path, flags: dict[str, Any]) -> HubGraph:
    settings = convert({"kind": "onnx", "file": str(path)} | flags, OnnxModel, where="flags")
    return load_graph(settings)


def _read(path: Path, advice: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {advice}") from error
