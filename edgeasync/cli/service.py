"""`edgeasync service` and `edgeasync bundle`: how systemd comes to run an agent, a hub or a peer."""

import contextlib
import os
import sys
from pathlib import Path
from typing import get_args

from edgeasync.cli.options import one_of
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
from edgeasync.ops.service.unit import USER, Kind, Unit
from edgeasync.ops.service.upgrade import upgrade
from edgeasync.runtime.peer_settings import PeerSettings


def install_service(
    kind: str, settings: Path | None, name: str | None, root: Path, printer: Printer, *, start: bool
) -> None:
    """Install a unit, and start it unless it is for another system; settings that are wrong are not installed."""
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
        activate(unit, place, _systemd(place), changed, start=start)
    _tell(printer, unit, "changed", changed, "nothing changed")


def remove_service(kind: str, name: str | None, root: Path, printer: Printer, *, purge: bool) -> None:
    """Stop a unit, and delete it."""
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


def print_service_status(kind: str, name: str | None, printer: Printer) -> None:
    """Print what systemd says of a unit."""
    unit, place = _find(kind, name, Path("/"))
    status = _systemd(place).status(unit.file)
    state, said = status.get("ActiveState", "unknown"), status.get("StatusText", "")
    restarts, pid = int(status.get("NRestarts") or 0), int(status.get("MainPID") or 0)
    printer.result(
        {"unit": unit.file, "state": state, "status": said, "restarts": restarts, "pid": pid},
        f"{unit.file}: {state}, {restarts} restarts" + (f", process {pid}" if pid else ""),
        *filter(None, [said]),
    )


def show_logs(kind: str, name: str | None, lines: int, *, follow: bool) -> None:
    """Become journalctl."""
    unit, place = _find(kind, name, Path("/"))
    command = ["journalctl", "--unit" if place.user else "--user-unit", unit.file, "--lines", str(lines)]
    try:
        os.execvp(command[0], [*command, "--follow"] if follow else command)  # noqa: S606 - no shell
    except OSError as error:
        raise StorageError(f"journalctl: {error.strerror}; the logs are in systemd's journal") from error


def upgrade_service(kind: str, source: str | None, name: str | None, timeout_s: float, printer: Printer) -> None:
    """Run the service from a new environment."""
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
    printer.result(
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
    known: Kind = one_of("the service", kind, get_args(Kind))
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
