"""`edgeasync model` and `edgeasync export`: commands on model files and runs, without a hub."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import safetensors.numpy
import typer

from edgeasync.cli.options import Json
from edgeasync.cli.output import Printer, print_table, remark_lines
from edgeasync.cli.outputs import BuiltGraph, CheckedGradient, CheckedModel, ExportedModel
from edgeasync.cli.settings_flags import named_by_flag
from edgeasync.config import convert
from edgeasync.durable.files import check_out, replace_file
from edgeasync.durable.run_folder import FORWARD_FILE, TRAINING_FILE
from edgeasync.errors import ConfigError, GraphError, ModelMismatchError, StorageError
from edgeasync.graphs.export import ONNX_SUFFIX, check_export_file, refuse_onnx, write_arrays
from edgeasync.graphs.graph_model import HubGraph, files_of, read_onnx_file
from edgeasync.graphs.model_file import VALUES_SUFFIX
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.graphs.peft import ADAPTERS_FILE, write_peft
from edgeasync.graphs.source import check_source, held_file, held_forward
from edgeasync.host.wall_clock import written
from edgeasync.ops.inspection import load_for_command
from edgeasync.ops.trained import (
    TrainedModel,
    best_model,
    input_files,
    local_patterns,
    newest_model,
    source_file,
)
from edgeasync.plugins import is_name
from edgeasync.protocol.status import EvaluationStatus

app = typer.Typer()

ModelFile = Annotated[Path, typer.Argument(metavar="FILE.onnx", help="A forward model or a training graph.")]
BatchSize = Annotated[int, typer.Option(min=1, max=65536, help="Examples per step.")]


@app.command("build")
def build_model(
    context: typer.Context,
    forward: Annotated[Path, typer.Argument(metavar="FORWARD.onnx", help="The forward model.")],
    out: Annotated[Path, typer.Option(help="File for the training graph.")],
    json: Json = False,
) -> None:
    """Build a training graph from a forward model.

    Also writes the initial values, to a .safetensors file beside the training graph.
    """
    values = out.with_suffix(VALUES_SUFFIX)
    if out.suffix == VALUES_SUFFIX:
        raise ConfigError(
            f"--out {out}: a {VALUES_SUFFIX} file stores only the initial values; use --out training.onnx"
        )
    settings = _settings(forward, context)
    for file in (out, values):
        check_out("--out", file, *files_of(settings))
    built = load_for_command(settings)
    if built.forward is None:
        raise ConfigError(f"{forward}: already a training graph; pass the forward model")
    replace_file(out, built.graph, private=False)
    replace_file(values, safetensors.numpy.save(dict(built.spec.views(built.initial))), private=False)
    result = BuiltGraph(
        graph=str(out),
        values=str(values),
        parameters=built.spec.trained_length,
        statistics=built.spec.length - built.spec.trained_length,
        bytes=len(built.graph),
        warnings=list(built.warnings),
        notes=list(built.notes),
    )
    Printer(json=json).result(
        result,
        f"{out}: trains {result.parameters} parameters, {result.bytes} bytes",
        f"{values}: initial values",
        *remark_lines(built.warnings, built.notes),
    )


@app.command("inspect")
def inspect_model(
    context: typer.Context,
    file: ModelFile,
    batch_size: BatchSize = 32,
    parameters: Annotated[
        bool, typer.Option("--parameters", help="Also list the trained arrays and running statistics.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what is trained, and the traffic, time and memory of training.

    If the file cannot be trained, show its contents, the reason, and the flags to try. Time and
    memory are measured in a new process, which takes a few steps on this machine.

    A file of edgeasync.torch.to_onnx records which layers were frozen in torch (requires_grad).
    Name them in --train to train them anyway. Other files do not record frozen layers: pass the
    layers to freeze with --freeze.
    """
    from edgeasync.cli.inspection import print_inspection
    from edgeasync.ops.inspection import inspect_file

    found = inspect_file(_settings(file, context), batch_size)
    print_inspection(found, file, Printer(json=json), parameters=parameters)
    if found.problem is not None:
        raise GraphError(found.problem)


@app.command("check")
def check_model(
    context: typer.Context,
    file: ModelFile,
    batch_size: BatchSize = 8,
    json: Json = False,
) -> None:
    """Check a model's gradients against finite differences of its loss."""
    printer = Printer(json=json)
    built = _load(file, context)
    from edgeasync.autodiff.check import check_gradients

    checks = check_gradients(built.graph, built.spec, built.initial, batch_size=batch_size)
    failed = [check for check in checks if not check.passed]
    if printer.json:
        gradients = msgspec.convert(checks, list[CheckedGradient], from_attributes=True)
        remarks = {"warnings": list(built.warnings), "notes": list(built.notes)}
        printer.object(CheckedModel(passed=not failed, gradients=gradients, **remarks))
    else:
        rows = [("gradient of", "derivative", "difference", "apart", "")]
        for check in checks:
            verdict = ("ok" if check.compared else "only zeros") if check.passed else "WRONG"
            numbers = (f"{check.slope:.3e}", f"{check.difference:.3e}", f"{check.error:.2%}")
            rows.append((check.name, *numbers, verdict))
        print_table(printer, rows)
        if zeros := [check.name for check in checks if check.passed and not check.compared]:
            printer.line(
                f"only zeros, nothing to compare: {', '.join(zeros)}. All their gradients are 0; "
                "check the layers after them, or freeze them"
            )
        for line in remark_lines(built.warnings, built.notes):
            printer.line(line)
    if failed:
        others = f" and {len(failed) - 1} more" if failed[1:] else ""
        raise GraphError(
            f"{file}: the gradient of {failed[0].name!r}{others} differs from the finite-difference "
            "gradient. If the loss is smooth near the initial values, this is a bug in edgeasync; please report "
            "it with the model"
        )


def export_run(
    run: Path, forward: Path | None, out: Path, printer: Printer, *, best: bool, peft: bool, trust_code: bool
) -> None:
    """Write a run's trained model, its newest or `best` version.

    The file is an ONNX model or named arrays. With `peft`, `out` is a folder for PEFT's files.
    """
    if not peft:
        check_export_file("--out", out)
    if not run.is_dir():
        raise StorageError(f"{run}: no such folder; pass the folder of a hub's run")
    read = [*input_files(run), *([] if forward is None else [forward])]
    check_out("--out", out / ADAPTERS_FILE if peft else out, *read, run=run)
    needs_model = peft or out.suffix == ONNX_SUFFIX
    if needs_model and forward is None and held_forward(run) is None:
        if peft:
            raise ConfigError(f"--peft: {run} has no ONNX model; pass the forward model with --model")
        raise ConfigError(f"{refuse_onnx('--out', out)}, or pass the trained forward model with --model")
    if not needs_model and forward is not None:
        raise ConfigError(
            f"--model {forward}: {out.name} stores arrays only; remove --model, or choose an --out that ends in "
            f"{ONNX_SUFFIX}"
        )
    trained = (best_model if best else newest_model)(run, trust_code=trust_code)
    if local := local_patterns(run):
        trained.remarks.append(f"{', '.join(local)}: local to each device; the file contains the hub's values")
    if not needs_model:
        write_arrays(out, trained.arrays, trained.metadata())
    elif peft:
        write_peft(out, _forward(forward, run, trained), trained.arrays)
    else:
        content = _exported(forward or run / FORWARD_FILE, _forward(forward, run, trained), trained)
        replace_file(out, content, private=False)
    printer.result(
        _describe(out, trained),
        f"{out}: {len(trained.arrays)} trained arrays of {trained.source}",
        f"version {trained.version} of {written(trained.made_s)}, {_worth(trained)}",
        *[f"note: {remark}" for remark in trained.remarks],
    )


def _forward(given: Path | None, run: Path, trained: TrainedModel) -> bytes:
    """Return the run's forward model or the `given` one, with adapters if the run trains some.

    Raises `GraphError`, and `ModelMismatchError` if the run did not train the given model.
    """
    try:
        from edgeasync.autodiff.adapters import adapt_as
    except ModuleNotFoundError as error:
        raise ConfigError("export needs the package onnx: pip install 'edgeasync[hub]'") from error
    if given is None:
        held = held_forward(run)
        assert held is not None
        return held
    content, graph = read_onnx_file(given), held_file(run / TRAINING_FILE)
    try:
        check_source(given, content, run, trained.arrays.keys(), source_file(run))
        return content if graph is None else adapt_as(content, graph)
    except GraphError as error:
        raise GraphError(f"{given}: {error}") from error


def _exported(source: Path, content: bytes, trained: TrainedModel) -> bytes:
    """Return the forward model with the trained arrays.

    Raises `GraphError` or `ModelMismatchError`.
    """
    from edgeasync.autodiff.export import export_model

    try:
        return export_model(content, trained.arrays, trained.metadata())
    except (GraphError, ModelMismatchError) as error:
        raise type(error)(f"cannot insert {trained.source} into {source}: {error}") from error


def _describe(out: Path, trained: TrainedModel) -> ExportedModel:
    found = trained.evaluation
    return ExportedModel(
        model=str(out),
        arrays=len(trained.arrays),
        version=trained.version,
        lineage=trained.lineage,
        time=round(trained.made_s, 3),
        evaluation=None if found is None else EvaluationStatus(found.number, found.loss, found.accuracy),
        remarks=trained.remarks,
    )


def _worth(trained: TrainedModel) -> str:
    """Describe a model's last evaluation; if it evaluated another version, name that version."""
    found = trained.evaluation
    if found is None:
        return "not evaluated"
    accuracy = "" if found.accuracy is None else f"accuracy {found.accuracy:.2%}, "
    of = "" if found.number == trained.version else f"last evaluated version {found.number}: "
    return f"{of}{accuracy}loss {found.loss:.4g}"


def _load(path: Path, context: typer.Context) -> HubGraph:
    return load_for_command(_settings(path, context))


def _settings(path: Path, context: typer.Context) -> OnnxModel:
    """Return the settings of a model from a file and flags. Raises `ConfigError`."""
    flags: dict[str, Any] = context.obj["model"]
    if is_name(str(path)) and not path.exists():
        raise ConfigError(
            f"{path} names code, but this command reads ONNX models; for code use 'edgeasync hub --check'"
        )
    try:
        return convert({"kind": "onnx", "file": str(path)} | flags, OnnxModel, where="flags")
    except ConfigError as error:
        raise named_by_flag(error, flags) from error
