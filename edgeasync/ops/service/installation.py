"""Installs and removes the files of a service. Installing again changes nothing."""

import contextlib
import os
import pwd
import re
import shutil
import stat
import sys
from pathlib import Path
from typing import NamedTuple, get_args

from edgeasync.durable.files import replace_file
from edgeasync.errors import ConfigError, StorageError
from edgeasync.ops.service.systemd import Systemd
from edgeasync.ops.service.unit import USER, Kind, Unit

FOLDER = Path("/var/lib/edgeasync")
"""Home folder of services that run for the whole machine."""

PROGRAM = Path("/opt/edgeasync/current/bin/edgeasync")
"""The command that `install.sh` installs for the machine."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
"""Names that are valid for units; a leading '-' would look like an option to systemd's commands."""

SYSUSERS = Path("/etc/sysusers.d/edgeasync.conf")
SYSUSERS_TEXT = f'u {USER} - "edgeasync" {FOLDER}\n'


class InstallPlace(NamedTuple):
    """Where to install: below `root`, for the whole machine or for the user whose home is `home`."""

    root: Path = Path("/")
    home: Path | None = None

    @property
    def units(self) -> Path:
        """The folder for unit files."""
        return self.under(Path("/etc/systemd/system") if self.home is None else self.home / ".config/systemd/user")

    @property
    def packaged(self) -> Path:
        """The folder with unit files of system packages, as seen by systemd."""
        return Path("/usr/lib/systemd") / ("system" if self.home is None else "user")

    @property
    def folder(self) -> Path:
        """The folder of settings, keys and state, as seen by the service."""
        return FOLDER if self.home is None else self.home / ".local/share/edgeasync"

    @property
    def user(self) -> str | None:
        """The user that the service runs as, or None for the caller."""
        return USER if self.home is None else None

    def under(self, path: Path) -> Path:
        """Return a path of the service below `root`."""
        return self.root / path.relative_to("/")


def find_unit(kind: Kind, place: InstallPlace, name: str | None) -> Unit:
    """Return the unit of a service.

    Raises `ConfigError` if the name is invalid, or used by another program or another kind of
    service.
    """
    if name == f"edgeasync-{kind}":
        name = None
    if name is not None:
        if not NAME.fullmatch(name):
            raise ConfigError(f"--name {name!r} is invalid; use letters, digits, '-' and '_'")
        if name in get_args(Kind):
            raise ConfigError(f"--name {name}: {name}.toml belongs to another service; choose another name")
        if name in {f"edgeasync-{other}" for other in get_args(Kind)}:
            raise ConfigError(
                f"--name {name} is already used by the {name.removeprefix('edgeasync-')} service; "
                "choose another name"
            )
        for folder in (place.units, place.under(place.packaged)):
            file = folder / f"{name}.service"
            other = _kind_of(file)
            if other is None and (file.is_symlink() or file.exists()):
                raise ConfigError(f"{file}: this unit belongs to another program; choose another --name")
            if other not in (None, kind):
                raise ConfigError(
                    f"{file}: this unit belongs to the {other} service; choose another --name, or pass {other} "
                    f"instead of {kind}"
                )
    program = find_program(Path(sys.prefix)) if place.root == Path("/") else PROGRAM
    return Unit(kind, program, place.folder, place.user, name or "")


def find_others(unit: Unit, place: InstallPlace) -> list[Path]:
    """Return the unit files of all other edgeasync services."""
    return [file for file in sorted(place.units.glob("*.service")) if file.name != unit.file and _kind_of(file)]


def check_program(*programs: Path) -> None:
    """Raise `ConfigError` unless the user that runs the machine's services may execute the programs."""
    for program in programs:
        real = program.resolve()
        for path in (*reversed(real.parents), real):
            if not (path.exists() and path.stat().st_mode & stat.S_IXOTH):
                raise ConfigError(
                    f"{program}: the user {USER} has no permission to run it, because of the mode of {path}; "
                    "install with devices/install.sh, or run this without sudo to install for your user only"
                )


def find_program(environment: Path) -> Path:
    """Return the path of the command `edgeasync` in an environment.

    If the link `current` points to the environment, the path goes through this link.
    """
    current = environment.parent / "current"
    with contextlib.suppress(OSError):
        if current.is_symlink() and current.resolve() == environment.resolve():
            environment = current
    return environment / "bin" / "edgeasync"


def install(unit: Unit, place: InstallPlace, settings: bytes | None) -> list[Path]:
    """Write the files of a service and return those that changed.

    `settings` is the content of a settings file, which replaces the installed one. If it is None,
    the installed one is kept. Raises `ConfigError` if there is no settings file, and `StorageError`
    if a file cannot be written.
    """
    folder, kept = place.under(unit.folder), place.under(unit.settings)
    if settings is None and not kept.exists():
        raise ConfigError(
            f"{kept}: no such file; pass the settings: edgeasync service install {unit.kind} FILE.toml"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{folder}: cannot be created: {error.strerror}; install as root, or for your own user"
        ) from error
    changed = []
    if place.user is not None and _write(place.under(SYSUSERS), SYSUSERS_TEXT.encode()):
        changed.append(place.under(SYSUSERS))
    if settings is not None and _write(kept, settings, private=True):
        # If the service's user owns the folder already, the file must belong to that user too.
        owner = folder.stat()
        os.chown(kept, owner.st_uid, owner.st_gid, follow_symlinks=False)
        changed.append(kept)
    file, link = place.units / unit.file, _link(unit, place)
    if _write(file, unit.text().encode()):
        changed.append(file)
    if not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../{unit.file}")
        changed.append(link)
    return changed


def activate(unit: Unit, place: InstallPlace, manager: Systemd, changed: list[Path], *, start: bool) -> None:
    """Reload systemd's units. With `start`, start the service if it changed or is not active."""
    if place.user is not None:
        manager.make_user()
        _give(place.under(unit.folder), place.user)
    if changed:
        manager.reload()
    if start and (changed or manager.status(unit.file).get("ActiveState") != "active"):
        manager.start(unit.file)


def _give(folder: Path, user: str) -> None:
    """Change the owner of a folder from root to the service's user, as systemd does at a start."""
    try:
        entry = pwd.getpwnam(user)
        if folder.stat().st_uid != entry.pw_uid:
            for path in (*folder.rglob("*"), folder):  # the folder last: its new owner could create links in it
                os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)
    except (KeyError, OSError) as error:
        raise StorageError(f"{folder}: cannot change its owner to {user} ({error}); install as root") from error


def remove(unit: Unit, place: InstallPlace, *, purge: bool) -> list[Path]:
    """Delete the files of a service and return them; settings, keys and state only with `purge`.

    Call this after the service has stopped. The system user is deleted by the caller.
    """
    gone = [_link(unit, place), place.units / unit.file]
    others = find_others(unit, place)
    if purge and not others:
        gone += [place.under(SYSUSERS)] if place.user is not None else []
        gone.append(place.under(unit.folder))
    elif purge:
        gone.append(place.under(unit.settings))
    removed = [path for path in gone if path.is_symlink() or path.exists()]
    for path in removed:
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError as error:
            raise StorageError(f"{path}: cannot be removed: {error.strerror}; remove it by hand") from error
    for folder in (gone[0].parent, *((place.under(SYSUSERS).parent,) if place.user else ())):
        with contextlib.suppress(OSError):
            folder.rmdir()  # fails if the folder contains other files
    return removed


def _link(unit: Unit, place: InstallPlace) -> Path:
    """Return the link that starts the unit at boot, as `systemctl enable` creates it."""
    return place.units / f"{unit.target}.wants" / unit.file


def _kind_of(file: Path) -> str | None:
    """Return the kind of an edgeasync unit file, or `None` for other files."""
    with contextlib.suppress(OSError):
        found = re.search(r"Description=edgeasync (\w+)", file.read_text("utf-8", errors="replace"))
        return None if found is None else found[1]
    return None


def _write(path: Path, content: bytes, *, private: bool = False) -> bool:
    """Write a file unless it has that content already. Return whether it was written."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == content:
            return False
    replace_file(path, content, private=private)
    if not private:
        path.chmod(0o644)
    return True
