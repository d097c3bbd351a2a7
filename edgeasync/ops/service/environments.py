"""The environments that a service runs from: numbered folders, and the link `current` to the one in use."""

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
"""The extra, and the package that it brings: in the same folder as onnxruntime, so it has to come alone."""

HUB, HUB_PACKAGE = "hub", "onnx"
"""The extra of a hub, and the package that it brings."""

OUTPUT_LINES = 5
"""Of a command that fails, how many of its last lines are told."""


class Environments:
    """A folder of environments, as `install.sh` makes it: `env-1`, `env-2`, and the link `current`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._link = home / "current"

    @property
    def current(self) -> Path:
        """The environment in use; raises `ConfigError` if there is no link to one."""
        if not self._link.is_symlink():
            raise ConfigError(
                f"{self._link}: no such link; upgrade what devices/install.sh has installed, by its own "
                "current/bin/edgeasync, or install again"
            )
        return self.home / self._link.readlink().name

    def make(self, source: str, extras: str) -> Path:
        """Return a new environment with edgeasync from `source`; if that fails nothing is left of it.

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
        """Let `current` lead to another environment, at once; raises `StorageError`."""
        temporary = self._link.with_name("current.part")
        try:
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(environment.name)
            temporary.replace(self._link)
        except OSError as error:
            raise StorageError(
                f"{self._link}: cannot be changed: {error.strerror}; upgrade as its owner"
            ) from error

    def drop_others(self, *kept: Path) -> None:
        """Delete all environments but these."""
        for path in self.home.iterdir():
            if NAME.fullmatch(path.name) and path not in kept:
                self.drop(path)

    def drop(self, environment: Path) -> None:
        """Delete an environment."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(environment)


def install_arguments(source: str, extras: str) -> list[str]:
    """Return how `pip install` is told a source: a folder of wheels, a wheel, a clone, or a name in an index."""
    wanted = f"[{extras}]" if extras else ""
    path = expanded(source)
    if any(path.glob("edgeasync-*.whl")):
        return ["--no-index", "--find-links", str(path.resolve()), f"edgeasync{wanted}"]
    if path.exists():
        return [f"{path.resolve()}{wanted}"]
    return [re.sub(r"^[\w.-]*", rf"\g<0>{wanted}", source)]  # extras stand before a version


def own_source() -> str:
    """Return the clone or wheel that this edgeasync was installed from, as pip has noted it (PEP 610).

    Raises `ConfigError` if it came from elsewhere. It never chooses an index by itself: a stranger may have taken
    the name there, and root would run the stranger's code.
    """
    noted = importlib.metadata.distribution("edgeasync").read_text("direct_url.json")
    url = urlsplit(json.loads(noted)["url"] if noted else "")
    path = unquote(url.path)
    if url.scheme != "file" or not Path(path).exists():
        raise ConfigError(
            "where does edgeasync come from? give a folder of wheels, a wheel, a clone, or a name in pip's index"
        )
    return path


def extras_of(kind: Kind) -> str:
    """Return the extras that the environment after this one needs: those of the service, and those that are here.

    A hub and an agent of one machine run from one environment.
    """
    wanted = {HUB: kind == "hub" or has_package(HUB_PACKAGE), GPU: has_package(GPU_PACKAGE)}
    return ",".join(extra for extra, is_wanted in wanted.items() if is_wanted)


def has_package(name: str) -> bool:
    """Return whether this environment has a package."""
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def run_told(command: list[str]) -> str:
    """Run a command, and return what it printed; raises `StorageError` with its last lines if it fails."""
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
        raise StorageError(f"{' '.join(command)}: exit code {done.returncode}: {lines}; cure that and try again")
    return done.stdout
