"""`edgeasync service` and `edgeasync bundle`: run an agent, a hub or a peer under systemd."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
import typer

from edgeasync.cli.options import Json, Source, one_of
from edgeasync.cli.output import Printer
from edgeasync.cli.outputs import Bundle, ServiceLine
from edgeasync.cli.settings import FILES
from edgeasync.config import expanded, parse_toml, read_bytes
from edgeasync.errors import ConfigError, PluginError, StorageError
from edgeasync.ops.service.bundle import Platform, Python, make_bundle
from edgeasync.ops.service.environments import Environments, extras_of, own_source
from edgeasync.ops.service.installation import (
    InstallPlace,
    activate,
    check_program,
    find_others,
    find_unit,
    install,
    remove,
)
from edgeasync.ops.service.systemd import Systemd
from edgeasync.ops.service.unit import USER, Unit
from edgeasync.ops.service.unit import Kind as ServiceKind
from edgeasync.ops.service.upgrade import upgrade
from edgeasync.runtime.peer_settings import PeerSettings

app = typer.Typer(rich_markup_mode=None)

Kind = Annotated[str, typer.Argument(metavar="agent|hub|peer", help="Type of the service.")]
UnitName = Annotated[
    str | None,
    typer.Option(
        "--name", help="Name of the systemd unit, for a second one [default: edgeasync-agent, -hub or -peer]."
    ),
]


@app.command("install")
def install_service(
    kind: Kind,
    settings: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE.toml", help="Settings file, which is copied [default: the one of an earlier install]."
        ),
    ] = None,
    name: UnitName = None,
    root: Annotated[
        Path,
        typer.Option(help="Install into the system in this folder, such as a mounted card, and do not start."),
    ] = Path("/"),
    no_start: Annotated[
        bool, typer.Option("--no-start", help="Start the service at the next boot, not now.")
    ] = False,
    json: Json = False,
) -> None:
    """Install a systemd service with its settings. Start it now and at every boot.

    Repeating the command changes nothing. As root it installs for the machine: the service runs as
    the user edgeasync, with its files in /var/lib/edgeasync. Otherwise it installs for the current
    user, in ~/.local/share/edgeasync.
    """
    unit, place = _find(kind, name, root)
    live, kept = place.root == Path("/"), place.under(unit.settings)
    content = None if settings is None else read_bytes(settings)  # once: it may be a pipe
    if content is not None:
        _check_settings(unit, content, str(settings))
    elif kept.exists():
        _check_settings(unit, read_bytes(kept), str(kept))
    if live and place.user is not None:
        check_program(unit.program, Path(sys.executable))
    changed = install(unit, place, content)
    if live:
        activate(unit, place, _systemd(place), changed, start=not no_start)
    _tell(Printer(json=json), unit, "changed", changed, "nothing changed")


@app.command("remove")
def remove_service(
    kind: Kind,
    name: UnitName = None,
    root: Annotated[Path, typer.Option(help="Remove the service from the system in this folder.")] = Path("/"),
    purge: Annotated[
        bool,
        typer.Option("--purge", help="Also delete settings, keys and state, and with the last unit the user."),
    ] = False,
    json: Json = False,
) -> None:
    """Stop a service and delete its unit. Settings, keys and state are kept."""
    printer = Printer(json=json)
    unit, place = _find(kind, name, root)
    live, manager = place.root == Path("/"), _systemd(place)
    if live and (place.units / unit.file).exists():
        manager.stop(unit.file)
    removed = remove(unit, place, purge=purge)
    if live and removed:
        manager.reload()
        if place.user is not None and place.folder in removed:
            manager.remove_user(USER)
    _tell(printer, unit, "removed", removed, "nothing to remove")
    folder = place.under(place.folder)
    if not printer.json and folder.exists():
        printer.line(f"kept settings, keys and state in {folder}")


@app.command("status")
def print_service_status(kind: Kind, name: UnitName = None, json: Json = False) -> None:
    """Show a service's state, its last status line and its restart count."""
    unit, place = _find(kind, name, Path("/"))
    status = _systemd(place).status(unit.file)
    state, said = status.get("ActiveState", "unknown"), status.get("StatusText", "")
    restarts, pid = int(status.get("NRestarts") or 0), int(status.get("MainPID") or 0)
    Printer(json=json).result(
        ServiceLine(unit=unit.file, state=state, status=said, restarts=restarts, pid=pid),
        f"{unit.file}: {state}, {restarts} restarts" + (f", process {pid}" if pid else ""),
        *filter(None, [said]),
    )


@app.command("logs")
def show_logs(
    kind: Kind,
    name: UnitName = None,
    follow: Annotated[bool, typer.Option("--follow", help="Print new lines as they arrive.")] = False,
    lines: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of recent lines to print.")] = 50,
) -> None:
    """Show a service's lines in systemd's journal."""
    unit, place = _find(kind, name, Path("/"))
    command = ["journalctl", "--unit" if place.user else "--user-unit", unit.file, "--lines", str(lines)]
    try:
        os.execvp(command[0], [*command, "--follow"] if follow else command)  # noqa: S606 - no shell
    except OSError as error:
        raise StorageError(f"journalctl cannot be run: {error.strerror}; install it, or correct PATH") from error


@app.command("upgrade")
def upgrade_service(
    kind: Kind,
    source: Source = None,
    name: UnitName = None,
    timeout_s: Annotated[float, typer.Option(min=1.0, max=3600.0, help="Seconds to wait for the start.")] = 120.0,
    json: Json = False,
) -> None:
    """Install a new version beside the old one and switch to it.

    Switch back if the service fails to start or join.
    """
    unit, place = _find(kind, name, Path("/"))
    environments, wanted = Environments(Path(sys.prefix).parent), source or own_source()
    old = upgrade(
        environments,
        lambda: environments.make(wanted, extras_of(unit.kind)),
        unit,
        _systemd(place),
        others=[file.name for file in find_others(unit, place)],
        limit_s=timeout_s,
    )
    new = environments.current
    Printer(json=json).result(
        ServiceLine(unit=unit.file, environment=str(new), kept=str(old)),
        f"{unit.file} now runs from {new}; the old environment is kept in {old}",
    )


def bundle_wheels(
    source: str | None, platform: str, python: str, out: Path, printer: Printer, *, extras: str = ""
) -> None:
    """Write a bundle of wheels for a board, and print its size."""
    board: Platform = one_of("--platform", platform, get_args(Platform))
    version: Python = one_of("--python", python, get_args(Python))
    files = make_bundle(source or own_source(), board, version, out, extras=extras)
    nbytes = sum(file.stat().st_size for file in files)
    printer.result(
        Bundle(folder=str(out), files=[file.name for file in files], bytes=nbytes),
        f"{out}: {len(files)} files, {nbytes / 2**20:,.1f} MiB",
        f"next: copy the folder to the board, and run there: sudo sh {out.name}/install.sh agent FILE.toml",
    )


def _check_settings(unit: Unit, content: bytes, where: str) -> None:
    """Raise `ConfigError` if the settings are invalid, so that the service would exit at once."""
    with contextlib.suppress(PluginError):  # the plugin may be installed in another system
        settings = parse_toml(content, FILES[f"{unit.kind}.toml"], where=where)
        if isinstance(settings, PeerSettings) and (missing := settings.missing()):
            raise ConfigError(f"{where}: {missing}")


def _find(kind: str, name: str | None, root: Path) -> tuple[Unit, InstallPlace]:
    """Return the unit and where to install it: for the machine as root, otherwise for the user."""
    known: ServiceKind = one_of("the service", kind, get_args(ServiceKind))
    if not root.is_dir():
        raise ConfigError(f"--root {root}: no such folder; pass the folder where the card or disk is mounted")
    of_user = os.geteuid() != 0 and root == Path("/")
    place = InstallPlace(root.resolve(), expanded("~") if of_user else None)
    return find_unit(known, place, name), place


def _systemd(place: InstallPlace) -> Systemd:
    return Systemd(of_user=place.user is None)


def _tell(
    printer: Printer, unit: Unit, done: Literal["changed", "removed"], files: list[Path], nothing: str
) -> None:
    printer.result(
        msgspec.structs.replace(ServiceLine(unit=unit.file), **{done: [str(file) for file in files]}),
        *([f"{done}: {file}" for file in files] or [f"{unit.file}: {nothing}"]),
    )
