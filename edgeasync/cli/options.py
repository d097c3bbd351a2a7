"""Flags that several commands share, each with the one help text that is right for all of them."""

from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON objects, one per line.")]
LogLevel = Annotated[
    str | None,
    typer.Option(
        metavar="LEVEL",
        help="Lowest level to log to stderr: debug (every frame), info, warning or error [default: warning].",
    ),
]

# What a training graph is made from.
Loss = Annotated[
    str | None, typer.Option(help="Loss of a forward model: cross_entropy, mse, l1, huber or bce_with_logits.")
]
Train = Annotated[
    list[str] | None, typer.Option(help="Parameters to train, a pattern such as 'head.*'. May be repeated.")
]
Freeze = Annotated[list[str] | None, typer.Option(help="Parameters not to train, a pattern. May be repeated.")]
Output = Annotated[str | None, typer.Option(help="The tensor that the loss reads [default: the only output].")]
Target = Annotated[
    str | None,
    typer.Option(
        help="What the loss compares the output with: label, or input for an autoencoder [default: label]."
    ),
]


# A device, as `agent` and `peer` run it and `doctor` looks at it.
AgentConfig = Annotated[Path | None, typer.Argument(help="The agent's settings, a TOML file.")]
Hubs = Annotated[
    list[str] | None,
    typer.Option(help="The hub's address, tcp://HOST:PORT. May be repeated: the agent tries each in turn."),
]
Data = Annotated[str | None, typer.Option(help="This device's data: .npz with x and y, or .csv.")]
DeviceId = Annotated[str | None, typer.Option(help="This device's name [default: the host's name].")]
State = Annotated[
    str | None,
    typer.Option(help="Folder of this device's identity [default: ~/.local/state/edgeasync/DEVICE_ID]."),
]
StepTime = Annotated[
    float | None, typer.Option(help="Least seconds that a local step takes, to imitate a slower device.")
]
Threads = Annotated[
    int | None, typer.Option(help="Cores for a step of an ONNX model [default: as suits the board, or 1].")
]
Provider = Annotated[
    str | None,
    typer.Option(help="Execution provider that computes a graph: auto, cpu, cuda or tensorrt [default: auto]."),
]
NoKeys = Annotated[bool, typer.Option("--insecure", help="Speak to a hub beyond this machine without keys.")]

# A run's folder may come from somebody else.
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Import code that only the run's folder names; it runs as you.")
]

# A running hub, as `status` and `wake` ask it.
HubAddress = Annotated[str, typer.Option(help="The hub's address, tcp://HOST:PORT.")]
AnswerTimeout = Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds to wait for an answer.")]
OperatorKeys = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of an operator's keys, for a hub with keys.")
]

Source = Annotated[
    str | None,
    typer.Argument(
        help="Where edgeasync comes from: a folder of wheels, a wheel, a clone, or a name in pip's index "
        "[default: the clone or wheel that this one was installed from]."
    ),
]


def given(**flags: Any) -> dict[str, Any]:
    """Leave out the flags that were not given: `None`, `False` and empty lists."""
    return {
        name: value for name, value in flags.items() if value is not None and value is not False and value != []
    }
