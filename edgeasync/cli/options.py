"""Flags that several commands share. Their help texts apply to all of these commands."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from edgeasync.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="Print JSON objects, one per line.")]
LogLevel = Annotated[
    str | None,
    typer.Option(
        metavar="LEVEL",
        help="Log level of stderr: debug (every frame), info, warning or error [default: warning].",
    ),
]

AgentConfig = Annotated[Path | None, typer.Argument(help="The agent's settings file (TOML).")]

# A run's folder may come from an untrusted source.
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Import code that the run's folder names; it runs with your permissions."),
]

# Flags of commands that connect to a running hub, such as `status` and `wake`.
HubAddress = Annotated[str, typer.Option(help="The hub's address, tcp://HOST:PORT.")]
AnswerTimeout = Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds to wait for an answer.")]
OperatorKeys = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of an operator's keys; required if the hub uses keys.")
]

Word = TypeVar("Word", bound=str)


def one_of(what: str, word: str, known: Sequence[Word]) -> Word:
    """Return `word` if it is one of `known`. Raises `ConfigError`, which names `what`."""
    for each in known:
        if word == each:
            return each
    raise ConfigError(f"{what} {word!r} is not known; choose from {', '.join(known)}")


Source = Annotated[
    str | None,
    typer.Argument(
        help="Source of edgeasync: a folder of wheels, a wheel, a clone, or a name in pip's index "
        "[default: the clone or wheel that this one was installed from]."
    ),
]
