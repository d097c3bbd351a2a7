"""Flags that several commands share, each with the one help text that is right for all of them."""

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
        help="Lowest level to log to stderr: debug (every frame), info, warning or error [default: warning].",
    ),
]

AgentConfig = Annotated[Path | None, typer.Argument(help="The agent's settings, a TOML file.")]

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

Word = TypeVar("Word", bound=str)


def one_of(what: str, word: str, known: Sequence[Word]) -> Word:
    """Return a word that is one of those known; raises `ConfigError`, which names `what` it was given for."""
    for each in known:
        if word == each:
            return each
    raise ConfigError(f"{what} {word!r} is not known; choose from {', '.join(known)}")


Source = Annotated[
    str | None,
    typer.Argument(
        help="Where edgeasync comes from: a folder of wheels, a wheel, a clone, or a name in pip's index "
        "[default: the clone or wheel that this one was installed from]."
    ),
]
