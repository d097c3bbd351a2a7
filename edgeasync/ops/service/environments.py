"""Virtual environments of a service: numbered folders, and the link `current` to the active one."""

import contextlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from edgeasync.config import expanded
from edgeasync.errors import ConfigError, StorageError
from edgeasync.ops.service.unit import Kind

NAME = re.compile(r"env-([0-9]+)")

GPU, GPU_PACKAGE = "gpu", "onnxruntime-gpu"
"""The GPU extra and its package.

Its files are in the same folder as those of onnxruntime, so only one of the two packages may be
installed.
"""

HUB, HUB_PACKAGE = "hub", "onnx"
"""The hub extra and its package."""

WEB, WEB_PACKAGE = "web", "starlette"
"""The extra of the hub's page, and one of its packages."""

OUTPUT_LINES = 5
"""Number of output lines shown when a command fails."""


class Environments:
    """The folder with environments `env-1`, `env-2`, ... and the link `current`.

    `install.sh` creates it.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._link = home / "current"

    @property
    def current(self) -> Path:
        """The active environment. Raises `ConfigError` if the link is missing."""
        if not self._link.is_symlink():
            raise ConfigError(
                f"{self._link}: no such link; run the upgrade with current/bin/edgeasync in the folder that "
                "devices/install.sh created, or install again"
            )
        return self.home / self._link.readlink().name

    def make(self, source: str, extras: str) -> Path:
        """Create an environment with edgeasync from `source`, and delete it if the installation fails.

        Raises `StorageError`.
        """
        numbers = [int(found[1]) for path in self.home.iterdir() if (found := NAME.fullmatch(path.name))]
        made = self.home / f"env-{max(numbers, default=0) + 1}"
        try:
            run_told([sys.executable, "-m", "venv", str(made)])
            pip = [str(made / "bin/python"), "-m", "pip"]
            wanted = install_arguments(source, extras)
            run_told([*pip, "install", "--quiet", *wanted])
            if GPU in extras.split(","):
                run_told([*pip, "uninstall", "--quiet", "--yes", "onnxruntime"])
                run_told([*pip, "install", "--quiet", "--force-reinstall", "--no-deps", *wanted[:-1], GPU_PACKAGE])
            run_told([str(made / "bin/edgeasync"), "--version"])
        except BaseException:
            self.drop(made)
            raise
        return made

    def switch(self, environment: Path) -> None:
        """Point `current` to another environment atomically. Raises `StorageError`."""
        temporary = self._link.with_name("current.part")
        try:
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(environment.name)
            temporary.replace(self._link)
        except OSError as error:
            raise StorageError(
                f"{self._link}: cannot be changed: {error.strerror}; run the upgrade as its owner"
            ) from error

    def drop_others(self, *kept: Path) -> None:
        """Delete all environments except `kept`."""
        for path in self.home.iterdir():
            if NAME.fullmatch(path.name) and path not in kept:
                self.drop(path)

    def drop(self, environment: Path) -> None:
        """Delete an environment."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(environment)


def install_arguments(source: str, extras: str) -> list[str]:
    """Return the arguments of `pip install` for a folder of wheels, a wheel, a clone, or a name."""
    wanted = f"[{extras}]" if extras else ""
    path = expanded(source)
    if any(path.glob("edgeasync-*.whl")):
        return ["--no-index", "--find-links", str(path.resolve()), f"edgeasync{wanted}"]
    if path.exists():
        return [f"{path.resolve()}{wanted}"]
    return [re.sub(r"^[\w.-]*", rf"\g<0>{wanted}", source)]  # extras precede a version


def own_source() -> str:
    """Return the clone or wheel that edgeasync was installed from, as recorded by pip (PEP 610).

    Raises `ConfigError` if edgeasync was installed from any other source. A package index is never
    the default, because someone else could own the name there, and root would run their code.
    """
    noted = importlib.metadata.distribution("edgeasync").read_text("direct_url.json")
    url = urlsplit(json.loads(noted)["url"] if noted else "")
    path = unquote(url.path)
    if url.scheme != "file" or not Path(path).exists():
        raise ConfigError(
            "the source of this edgeasync is unknown; pass a folder of wheels, a wheel, a clone, or a name in "
            "pip's index"
        )
    return path


def extras_of(kind: Kind) -> str:
    """Return the extras for the next environment: those that the service needs or that are installed.

    A hub and an agent on one machine share an environment.
    """
    wanted = {
        HUB: kind == "hub" or has_package(HUB_PACKAGE),
        WEB: kind == "hub" or has_package(WEB_PACKAGE),
        GPU: has_package(GPU_PACKAGE),
    }
    return ",".join(extra for extra, is_wanted in wanted.items() if is_wanted)


def has_package(name: str) -> bool:
    """Return whether a package is installed in this environment."""
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def run_told(command: list[str]) -> str:
    """Run a command and return its output.

    If the command fails, raise `StorageError` with the last lines of its output.
    """
    try:
        done = subprocess.run(  # noqa: S603 - no shell
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            umask=0o022,  # the service's user must be able to read what root installs
            check=False,
        )
    except OSError as error:
        raise StorageError(f"{command[0]}: {error.strerror}; install it") from error
    if done.returncode:
        lines = "; ".join(done.stdout.strip().splitlines()[-OUTPUT_LINES:])
        raise StorageError(
            f"{' '.join(command)}: exit code {done.returncode}: {lines}; fix the cause and try again"
        )
    return done.stdout
