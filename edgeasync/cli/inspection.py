"""Prints what `edgeasync model inspect` found, in about ten lines."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgeasync.autodiff.contents import TensorInfo
from edgeasync.cli.output import Printer, print_table, remark_lines
from edgeasync.ops.doctor.training import duration
from edgeasync.ops.inspection import Inspection, TrainingSummary

PLAIN = "4 bytes a value on loopback"
"""On links as fast as loopback, encoding would cost more time than it saves."""


def print_inspection(found: Inspection, file: Path, printer: Printer, *, parameters: bool) -> None:
    """Print the findings about a file, and its trained arrays if `parameters` is set."""
    if printer.json:
        printer.object(found)
        return
    for name, words in _rows(found, file):
        printer.line(f"{name:<11}  {words}")
    for line in remark_lines(found.warnings, found.notes):
        printer.line(line)
    if parameters and found.training is not None:
        rows = [("parameter", "shape", "values", "role")]
        rows += [
            (array.name, _shape(array.shape) or "scalar", f"{math.prod(array.shape):,}", array.role)
            for array in found.training.arrays
        ]
        print_table(printer, rows)


def _rows(found: Inspection, file: Path) -> list[tuple[str, str]]:
    contents, training = found.contents, found.training
    rows = [("inputs", _tensors(contents.inputs)), ("outputs", _tensors(contents.outputs))]
    if training is None:
        rows += [("weights", f"{contents.weights:,} float32 values"), ("operators", _counts(contents.operators))]
        if contents.without_gradient:
            rows.append(("no gradient", _counts(contents.without_gradient)))
        if found.flags:
            rows.append(("try", f"edgeasync model inspect {shlex.join([str(file), *found.flags])}"))
    else:
        rows += _training_rows(training)
    return rows


def _training_rows(training: TrainingSummary) -> list[tuple[str, str]]:
    up, down, whole = training.exchange.up, training.exchange.down, training.exchange.whole
    values = (
        f"{training.parameters:,} trained, {training.statistics:,} running statistics, {training.frozen:,} frozen"
    )
    exchange = f"{_size(up.bytes)} up ({up.codec}), {_size(down.bytes)} down ({down.codec})"
    base = f" and a base of {_size(training.base_bytes)}" if training.base_bytes else ""
    rows = [
        ("trained", f"{training.output} with {training.loss}, {_tensor(training.target)}"),
        ("values", values),
        ("graph", f"{training.graph_nodes:,} nodes, {_size(training.graph_bytes)}{base}, received once"),
        ("exchange", f"{exchange}; {_size(whole.bytes)} when joining ({whole.codec}); {PLAIN}"),
    ]
    if (step := training.step) is None:
        return [*rows, ("step", f"not measured: {training.step_problem}")]
    cores = _counted(training.threads, "core")
    examples = _counted(step.examples, "example")
    return [
        *rows,
        ("step", f"{duration(step.seconds)} for {examples} on {cores} of this machine"),
        ("memory", f"{_size(step.memory_bytes)} in a process that takes steps, without data"),
    ]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _tensors(infos: list[TensorInfo]) -> str:
    return "; ".join(map(_tensor, infos))


def _tensor(info: TensorInfo) -> str:
    shape = "" if info.shape is None else _shape([size or "?" for size in info.shape])
    return f"{info.name} {info.dtype} {shape}".rstrip()


def _shape(sizes: Sequence[int | str]) -> str:
    return " x ".join(map(str, sizes))


def _counts(operators: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in operators.items())


def _size(nbytes: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} bytes"
