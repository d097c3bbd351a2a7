"""The arguments of `edgeasync model build`, `inspect` and `check`."""

from pathlib import Path
from typing import Annotated

import typer

from edgeasync.cli.mistakes import Commands
from edgeasync.cli.options import Json
from edgeasync.cli.output import Printer

app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Build, inspect and check training graphs of ONNX models."
)

ModelFile = Annotated[Path, typer.Argument(metavar="FILE.onnx", help="A forward model or a training graph.")]
BatchSize = Annotated[int, typer.Option(min=2, max=65536, help="Examples in a step.")]


@app.command("build")
def model_build(
    context: typer.Context,
    forward: Annotated[Path, typer.Argument(metavar="FORWARD.onnx", help="The forward model.")],
    out: Annotated[Path, typer.Option(help="Where to write the training graph.")],
    json: Json = False,
) -> None:
    """Build a training graph from a forward model. Its initial values go into a .safetensors file beside it."""
    from edgeasync.cli.model import build_model

    build_model(forward, context.obj["model"], out, Printer(json=json))


@app.command("inspect")
def model_inspect(
    context: typer.Context,
    file: ModelFile,
    batch_size: BatchSize = 32,
    json: Json = False,
) -> None:
    """Show what a model trains, and the arithmetic and memory of a step.

    A file of edgeasync.torch.to_onnx says which layers were frozen in torch (requires_grad): name them in --train
    to train them all the same. In any other file they look like all others: name them in --freeze.
    """
    from edgeasync.cli.model import inspect_model

    inspect_model(file, context.obj["model"], batch_size, Printer(json=json))


@app.command("check")
def model_check(
    context: typer.Context,
    file: ModelFile,
    batch_size: BatchSize = 8,
    json: Json = False,
) -> None:
    """Check a model's gradients against finite differences of its loss."""
    from edgeasync.cli.model import check_model

    check_model(file, context.obj["model"], batch_size, Printer(json=json))
