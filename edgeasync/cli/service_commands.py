"""The arguments of `edgeasync service`."""

from pathlib import Path
from typing import Annotated

import typer

from edgeasync.cli.mistakes import Commands
from edgeasync.cli.options import Json, Source
from edgeasync.cli.output import Printer

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Let systemd run an agent, a hub or a peer: at every boot, again after a crash, and with a watchdog.",
)

Kind = Annotated[str, typer.Argument(metavar="agent|hub|peer", help="Which of the three.")]
UnitName = Annotated[
    str | None,
    typer.Option(
        "--name", help="Another name for the unit, for a second one [default: edgeasync-agent, -hub or -peer]."
    ),
]


@app.command("install")
def service_install(
    kind: Kind,
    settings: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE.toml", help="Its settings, which are copied [default: those of an earlier install]."
        ),
    ] = None,
    name: UnitName = None,
    root: Annotated[
        Path,
        typer.Option(help="Install into the system in this folder, such as a mounted card, and start nothing."),
    ] = Path("/"),
    no_start: Annotated[
        bool, typer.Option("--no-start", help="Do not start it now, only at the next boot.")
    ] = False,
    json: Json = False,
) -> None:
    """Write the unit and its settings, and start it: now and at every boot. A second time changes nothing.

    As root for the machine, under the user edgeasync in /var/lib/edgeasync. Else for the user who calls, in
    ~/.local/share/edgeasync.
    """
    from edgeasync.cli.service import install_service

    install_service(kind, settings, name, root, Printer(json=json), start=not no_start)


@app.command("remove")
def service_remove(
    kind: Kind,
    name: UnitName = None,
    root: Annotated[Path, typer.Option(help="Remove from the system in this folder.")] = Path("/"),
    purge: Annotated[
        bool,
        typer.Option("--purge", help="Delete settings, keys and state, too; with the last unit also the user."),
    ] = False,
    json: Json = False,
) -> None:
    """Stop it, and delete its unit. Settings, keys and state stay."""
    from edgeasync.cli.service import remove_service

    remove_service(kind, name, root, Printer(json=json), purge=purge)


@app.command("status")
def service_status(kind: Kind, name: UnitName = None, json: Json = False) -> None:
    """Show whether it runs, what it says of itself, and how often it was restarted."""
    from edgeasync.cli.service import print_service_status

    print_service_status(kind, name, Printer(json=json))


@app.command("logs")
def service_logs(
    kind: Kind,
    name: UnitName = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show new lines as they come.")] = False,
    lines: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many of the last lines.")] = 50,
) -> None:
    """Show its lines in systemd's journal."""
    from edgeasync.cli.service import show_logs

    show_logs(kind, name, lines, follow=follow)


@app.command("upgrade")
def service_upgrade(
    kind: Kind,
    source: Source = None,
    name: UnitName = None,
    timeout_s: Annotated[float, typer.Option(min=1.0, max=3600.0, help="Seconds for it to come up.")] = 120.0,
    json: Json = False,
) -> None:
    """Install a new version beside the old one, and switch to it. Switch back if the agent does not join."""
    from edgeasync.cli.service import upgrade_service

    upgrade_service(kind, source, name, timeout_s, Printer(json=json))
