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

# What a training graph is made from: with a hub it says that, without one each agent.
_LOSS = "Loss of a forward model: cross_entropy, mse, l1, huber or bce_with_logits."
_TRAIN = "Parameters to train, a pattern such as 'head.*'. May be repeated."
_FREEZE = "Parameters not to train, a pattern. May be repeated."
_OUTPUT = "The tensor that the loss reads [default: the only output]."
_TARGET = "What the loss compares the output with: label, or input for an autoencoder [default: label]."
Loss = Annotated[str | None, typer.Option(help=_LOSS)]
Train = Annotated[list[str] | None, typer.Option(help=_TRAIN)]
Freeze = Annotated[list[str] | None, typer.Option(help=_FREEZE)]
Output = Annotated[str | None, typer.Option(help=_OUTPUT)]
Target = Annotated[str | None, typer.Option(help=_TARGET)]


def _hubless(text: str) -> str:
    return f"Without a hub: {text[0].lower()}{text[1:]}"


PeerLoss = Annotated[str | None, typer.Option(help=_hubless(_LOSS))]
PeerTrain = Annotated[list[str] | None, typer.Option(help=_hubless(_TRAIN))]
PeerFreeze = Annotated[list[str] | None, typer.Option(help=_hubless(_FREEZE))]
PeerOutput = Annotated[str | None, typer.Option(help=_hubless(_OUTPUT))]
PeerTarget = Annotated[str | None, typer.Option(help=_hubless(_TARGET))]

# A device, as `agent` runs it and `doctor` looks at it.
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
