"""`edgeasync service` and `edgeasync bundle`: how systemd comes to run an agent, a hub or a peer."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, get_args

import typer

from edgeasync.cli.options import Json, Source, one_of
from edgeasync.cli.output import Printer
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

app = typer.Typer()

Kind = Annotated[str, typer.Argument(metavar="agent|hub|peer", help="Which of the three.")]
UnitName = Annotated[
    str | None,
    typer.Option(
        "--name", help="Another name for the unit, for a second one [default: edgeasync-agent, -hub or -peer]."
    ),
]


@app.command("install")
def install_service(
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
    root: Annotated[Path, typer.Option(help="Remove from the system in this folder.")] = Path("/"),
    purge: Annotated[
        bool,
        typer.Option("--purge", help="Delete settings, keys and state, too; with the last unit also the user."),
    ] = False,
    json: Json = False,
) -> None:
    """Stop it, and delete its unit. Settings, keys and state stay."""
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
        printer.line(f"settings, keys and state stay in {folder}")


@app.command("status")
def print_service_status(kind: Kind, name: UnitName = None, json: Json = False) -> None:
    """Show whether it runs, what it says of itself, and how often it was restarted."""
    unit, place = _find(kind, name, Path("/"))
    status = _systemd(place).status(unit.file)
    state, said = status.get("ActiveState", "unknown"), status.get("StatusText", "")
    restarts, pid = int(status.get("NRestarts") or 0), int(status.get("MainPID") or 0)
    Printer(json=json).result(
        {"unit": unit.file, "state": state, "status": said, "restarts": restarts, "pid": pid},
        f"{unit.file}: {state}, {restarts} restarts" + (f", process {pid}" if pid else ""),
        *filter(None, [said]),
    )


@app.command("logs")
def show_logs(
    kind: Kind,
    name: UnitName = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show new lines as they come.")] = False,
    lines: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many of the last lines.")] = 50,
) -> None:
    """Show its lines in systemd's journal."""
    unit, place = _find(kind, name, Path("/"))
    command = ["journalctl", "--unit" if place.user else "--user-unit", unit.file, "--lines", str(lines)]
    try:
        os.execvp(command[0], [*command, "--follow"] if follow else command)  # noqa: S606 - no shell
    except OSError as error:
        raise StorageError(f"journalctl: {error.strerror}; the logs are in systemd's journal") from error


@app.command("upgrade")
def upgrade_service(
    kind: Kind,
    source: Source = None,
    name: UnitName = None,
    timeout_s: Annotated[float, typer.Option(min=1.0, max=3600.0, help="Seconds for it to come up.")] = 120.0,
    json: Json = False,
) -> None:
    """Install a new version beside the old one, and switch to it. Switch back if the agent does not join."""
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
        {"unit": unit.file, "environment": str(new), "kept": str(old)},
        f"{unit.file} runs from {new}; the old environment stays in {old}",
    )


def bundle_wheels(
    source: str | None, platform: str, python: str, out: Path, printer: Printer, *, extras: str = ""
) -> None:
    """Make a folder of wheels."""
    board: Platform = one_of("--platform", platform, get_args(Platform))
    version: Python = one_of("--python", python, get_args(Python))
    files = make_bundle(source or own_source(), board, version, out, extras=extras)
    nbytes = sum(file.stat().st_size for file in files)
    printer.result(
        {"folder": str(out), "files": [file.name for file in files], "bytes": nbytes},
        f"{out}: {len(files)} files, {nbytes / 2**20:,.1f} MiB",
        f"next: carry it to the board, and there: sudo sh {out.name}/install.sh agent FILE.toml",
    )


def _check_settings(unit: Unit, content: bytes, where: str) -> None:
    """Raise `ConfigError` for settings with a mistake, which would end the service."""
    with contextlib.suppress(PluginError):  # another system may have it
        settings = parse_toml(content, FILES[f"{unit.kind}.toml"], where=where)
        if isinstance(settings, PeerSettings) and (missing := settings.missing()):
            raise ConfigError(f"{where}: {missing}")


def _find(kind: str, name: str | None, root: Path) -> tuple[Unit, InstallPlace]:
    """Return the unit that is meant, and where it lies: for the machine if root calls, else for the caller."""
    known: ServiceKind = one_of("the service", kind, get_args(ServiceKind))
    if not root.is_dir():
        raise ConfigError(f"--root {root}: no such folder; give the one where the card or disk is mounted")
    of_user = os.geteuid() != 0 and root == Path("/")
    place = InstallPlace(root.resolve(), expanded("~") if of_user else None)
    return find_unit(known, place, name), place


def _systemd(place: InstallPlace) -> Systemd:
    return Systemd(of_user=place.user is None)


def _tell(printer: Printer, unit: Unit, done: str, files: list[Path], nothing: str) -> None:
    printer.result(
        {"unit": unit.file, done: [str(file) for file in files]},
        *([f"{done}: {file}" for file in files] or [f"{unit.file}: {nothing}"]),
    )
