"""The files of a service: written so that a second time changes nothing, and removed so that nothing is left."""

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
"""The home of the machine's services."""

PROGRAM = Path("/opt/edgeasync/current/bin/edgeasync")
"""The command that `install.sh` makes for the machine."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
"""Of a unit: systemd takes no other letters, and its commands would take a first '-' for an option."""

SYSUSERS = Path("/etc/sysusers.d/edgeasync.conf")
SYSUSERS_TEXT = f'u {USER} - "edgeasync" {FOLDER}\n'


class InstallPlace(NamedTuple):
    """Where a service is installed: below `root`, for the whole machine or for one user with this home."""

    root: Path = Path("/")
    home: Path | None = None

    @property
    def units(self) -> Path:
        """The folder of units."""
        return self.under(Path("/etc/systemd/system") if self.home is None else self.home / ".config/systemd/user")

    @property
    def packaged(self) -> Path:
        """The folder of units that packages of the system have, as systemd sees it."""
        return Path("/usr/lib/systemd") / ("system" if self.home is None else "user")

    @property
    def folder(self) -> Path:
        """The folder of settings, keys and state, as the service sees it."""
        return FOLDER if self.home is None else self.home / ".local/share/edgeasync"

    @property
    def user(self) -> str | None:
        """The user that the service runs as, if it is not the caller."""
        return USER if self.home is None else None

    def under(self, path: Path) -> Path:
        """Return where a path of the service lies here."""
        return self.root / path.relative_to("/")


def find_unit(kind: Kind, place: InstallPlace, name: str | None) -> Unit:
    """Return the unit of a service; raises `ConfigError` for a name that is none, or that is taken.

    Another program may have it, or a service of another kind.
    """
    if name == f"edgeasync-{kind}":
        name = None
    if name is not None:
        if not NAME.fullmatch(name):
            raise ConfigError(f"--name {name!r} is not a name: take letters, digits, '-' and '_'")
        if name in get_args(Kind):
            raise ConfigError(f"--name {name}: another unit has the settings {name}.toml; give another")
        if name in {f"edgeasync-{other}" for other in get_args(Kind)}:
            raise ConfigError(f"--name {name} is that of the {name.removeprefix('edgeasync-')}; give another")
        for folder in (place.units, place.under(place.packaged)):
            file = folder / f"{name}.service"
            other = _kind_of(file)
            if other is None and (file.is_symlink() or file.exists()):
                raise ConfigError(f"{file}: is another program's unit; give another --name")
            if other not in (None, kind):
                raise ConfigError(f"{file}: is the {other}'s unit; give another --name, or say {other}")
    program = find_program(Path(sys.prefix)) if place.root == Path("/") else PROGRAM
    return Unit(kind, program, place.folder, place.user, name or "")


def find_others(unit: Unit, place: InstallPlace) -> list[Path]:
    """Return the files of all other units of ours."""
    return [file for file in sorted(place.units.glob("*.service")) if file.name != unit.file and _kind_of(file)]


def check_program(*programs: Path) -> None:
    """Raise `ConfigError` unless the machine's services, which have a user of their own, may run these."""
    for program in programs:
        real = program.resolve()
        for path in (*reversed(real.parents), real):
            if not (path.exists() and path.stat().st_mode & stat.S_IXOTH):
                raise ConfigError(
                    f"{program}: the user {USER} may not run it, because of {path}; "
                    "install by devices/install.sh, or without sudo for yourself"
                )


def find_program(environment: Path) -> Path:
    """Return the command of an environment: through the link that an upgrade moves, if one leads there."""
    current = environment.parent / "current"
    with contextlib.suppress(OSError):
        if current.is_symlink() and current.resolve() == environment.resolve():
            environment = current
    return environment / "bin" / "edgeasync"


def install(unit: Unit, place: InstallPlace, settings: bytes | None) -> list[Path]:
    """Write what a service needs; return the files that changed. Raises `ConfigError` and `StorageError`.

    `settings` are a file's content. They replace those that are there; without them these must be there.
    """
    folder, kept = place.under(unit.folder), place.under(unit.settings)
    if settings is None and not kept.exists():
        raise ConfigError(
            f"{kept}: no such file; give the settings: edgeasync service install {unit.kind} FILE.toml"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be made: {error.strerror}; install as root, or as a user") from error
    changed = []
    if place.user is not None and _write(place.under(SYSUSERS), SYSUSERS_TEXT.encode()):
        changed.append(place.under(SYSUSERS))
    if settings is not None and _write(kept, settings, private=True):
        # Of a folder that systemd has not yet given to the service it gives away the files, too.
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
    """Let systemd know what was installed; with `start`, start it if it does not run or has changed."""
    if place.user is not None:
        manager.make_user()
        _give(place.under(unit.folder), place.user)
    if changed:
        manager.reload()
    if start and (changed or manager.status(unit.file).get("ActiveState") != "active"):
        manager.start(unit.file)


def _give(folder: Path, user: str) -> None:
    """Give a folder that root has made to the service's user, who is there by now, as systemd would at a start."""
    try:
        entry = pwd.getpwnam(user)
        if folder.stat().st_uid != entry.pw_uid:
            for path in (*folder.rglob("*"), folder):  # the folder last: from then on the user can put links there
                os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)
    except (KeyError, OSError) as error:
        raise StorageError(f"{folder}: cannot be given to the user {user} ({error}); install as root") from error


def remove(unit: Unit, place: InstallPlace, *, purge: bool) -> list[Path]:
    """Delete what `install` wrote, and return it: settings, keys and state only with `purge`.

    The machine's user stays with the folder, which belongs to it. Call it when the service is stopped.
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
            folder.rmdir()  # one that holds something else stays
    return removed


def _link(unit: Unit, place: InstallPlace) -> Path:
    """Return the link by which systemd starts the unit at boot; it is what `systemctl enable` makes."""
    return place.units / f"{unit.target}.wants" / unit.file


def _kind_of(file: Path) -> str | None:
    """Return which service of ours a file is the unit of, or `None`."""
    with contextlib.suppress(OSError):
        found = re.search(r"Description=edgeasync (\w+)", file.read_text("utf-8", errors="replace"))
        return None if found is None else found[1]
    return None


def _write(path: Path, content: bytes, *, private: bool = False) -> bool:
    """Write a file unless it holds that already; return whether it did not."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == content:
            return False
    replace_file(path, content, private=private)
    if not private:
        path.chmod(0o644)
    return True
