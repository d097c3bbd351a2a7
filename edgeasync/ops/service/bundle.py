"""Writes a folder of wheels for a board, with a script that installs them without a network."""

import importlib.resources
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Literal

from edgeasync.errors import ConfigError, StorageError
from edgeasync.ops.service.environments import run_told

Platform = Literal["pi", "jetson", "x86"]
Python = Literal["3.11", "3.12", "3.13"]

INSTALLER = "install.sh"

_MACHINES: dict[Platform, tuple[str, int]] = {
    "pi": ("aarch64", 36),
    "jetson": ("aarch64", 35),
    "x86": ("x86_64", 36),
}
"""The architecture of each platform, and the minor version of glibc 2 on the oldest supported system."""

GLIBC_MIN = 17
"""Minor version of the oldest glibc that current wheels support."""


def download_arguments(platform: Platform, python: Python) -> list[str]:
    """Return the arguments of `pip download` that select the target machine and Python."""
    machine, newest = _MACHINES[platform]
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(newest, GLIBC_MIN - 1, -1)]
    tags += [f"manylinux2014_{machine}", f"linux_{machine}"]
    abis = [f"cp{python.replace('.', '')}", "abi3", "none"]
    chosen = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    return [
        *chosen,
        *[word for abi in abis for word in ("--abi", abi)],
        *[w for tag in tags for w in ("--platform", tag)],
    ]


def make_bundle(source: str, platform: Platform, python: Python, out: Path, *, extras: str = "") -> list[Path]:
    """Download edgeasync and its dependencies into `out`, add `install.sh`, and return the files.

    `source` is a wheel, a clone, or a name in pip's index. Raises `ConfigError` or `StorageError`.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            f"--out {out}: this folder is not empty, and its wheels could be mixed with other versions; choose an "
            "empty folder"
        )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as folder:
        # pip looks up a bare word in the index, even if a folder has that name.
        named = str(Path(source).resolve()) if Path(source).exists() else source
        run_told([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, named])
        wheels = list(Path(folder).glob("edgeasync-*.whl"))
        if len(wheels) != 1:
            raise ConfigError(
                f"{source}: not a package of edgeasync; pass a wheel, a clone, or a name in pip's index"
            )
        wanted = f"{wheels[0]}[{extras}]" if extras else str(wheels[0])
        arguments = [*download_arguments(platform, python), "--dest", str(out.resolve())]
        run_told([*pip, "download", "--quiet", *arguments, wanted])
    try:
        installer = importlib.resources.files("edgeasync.ops.service") / INSTALLER
        with importlib.resources.as_file(installer) as file:
            shutil.copy(file, out / INSTALLER)
    except OSError as error:
        raise StorageError(
            f"{out}: cannot be written: {error.strerror}; free disk space, or correct the folder's permissions"
        ) from error
    (out / INSTALLER).chmod(0o755)
    return sorted(out.iterdir())
