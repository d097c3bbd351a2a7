"""The arguments of `edgeasync keys`."""

from pathlib import Path
from typing import Annotated

import typer

from edgeasync.cli.mistakes import Commands
from edgeasync.cli.options import Json
from edgeasync.cli.output import Printer

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Manage who may talk to a hub: make its keys, enrol devices, revoke keys.",
)

Keys = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the hub's keys [default: ~/.config/edgeasync/keys]."),
]
Reached = Annotated[
    list[str] | None,
    typer.Option(help="Where devices reach the hub, tcp://HOST:PORT. The folder remembers it. May be repeated."),
]


@app.command("init")
def keys_init(keys: Keys = None, address: Reached = None, json: Json = False) -> None:
    """Make a hub's key, an allow-list, and an operator key for yourself."""
    from edgeasync.cli.keys import init_keys

    init_keys(keys, address or [], Printer(json=json))


@app.command("enrol")
def keys_enrol(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The device's name. The key replaces a former key of that name.")
    ],
    role: Annotated[str, typer.Option(help="What the key may do: device or operator.")] = "device",
    key: Annotated[
        str | None,
        typer.Option(metavar="PUBLIC_KEY", help="The device's own public key, to admit it without a token."),
    ] = None,
    address: Reached = None,
    valid_hours: Annotated[
        float | None, typer.Option(help="How long the token may be used; 168 at most. Without it ten minutes.")
    ] = None,
    keys: Keys = None,
    json: Json = False,
) -> None:
    """Print a token for one device to enrol with, once, within ten minutes. Or admit a public key."""
    from edgeasync.cli.keys import enrol

    enrol(keys, name, Printer(json=json), role=role, key=key, addresses=address or [], valid_hours=valid_hours)


@app.command("list")
def keys_list(keys: Keys = None, json: Json = False) -> None:
    """List admitted keys, revoked keys, and tokens that still work."""
    from edgeasync.cli.keys import list_keys

    list_keys(keys, Printer(json=json))


@app.command("revoke")
def keys_revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The device or person whose key to revoke.")],
    keys: Keys = None,
    json: Json = False,
) -> None:
    """Revoke a key. A running hub closes its connection within a second."""
    from edgeasync.cli.keys import revoke

    revoke(keys, name, Printer(json=json))


@app.command("pending")
def keys_pending(
    clear: Annotated[
        bool, typer.Option("--clear", help="Forget them. A device that still asks is listed again.")
    ] = False,
    keys: Keys = None,
    json: Json = False,
) -> None:
    """List unknown keys that asked a hub with --knocking for admission."""
    from edgeasync.cli.keys import list_pending

    list_pending(keys, Printer(json=json), clear=clear)


@app.command("accept")
def keys_accept(
    fingerprint: Annotated[
        str,
        typer.Argument(metavar="FINGERPRINT", help="The key's fingerprint, as 'pending' and the agent show it."),
    ],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The device's name. The key replaces a former key of that name.")
    ],
    keys: Keys = None,
    json: Json = False,
) -> None:
    """Admit a key that asked for admission."""
    from edgeasync.cli.keys import accept

    accept(keys, fingerprint, name, Printer(json=json))


@app.command("refuse")
def keys_refuse(
    fingerprint: Annotated[
        str, typer.Argument(metavar="FINGERPRINT", help="The key's fingerprint, as 'pending' shows it.")
    ],
    keys: Keys = None,
    json: Json = False,
) -> None:
    """Refuse a key that asked for admission: 'pending' no longer shows it."""
    from edgeasync.cli.keys import refuse

    refuse(keys, fingerprint, Printer(json=json))
