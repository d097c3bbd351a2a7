"""The private folder through which `train` and its worker processes exchange files."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.data.dataset import Dataset, Features, Inputs
from edgeasync.errors import ConfigError, StorageError
from edgeasync.sdk.shares import Share
from edgeasync.sdk.workers.base import MakeTrainer, in_thread, worker_name
from edgeasync.sdk.workers.pickling import dump, load
from edgeasync.temporary import TemporaryFolder

MAKE_FILE = "make-trainer"
"""File with the pickled function that creates trainers, which is the same for all workers."""


HUB_SOCKET = "hub"
"""Name of the hub's local socket. A peer's number is the name of its socket."""

SOCKET_PATH_BYTES_MAX = 107
"""Linux's limit for the length of a socket's path."""


async def make_folder(write: Callable[[Path], None]) -> TemporaryFolder:
    """Create a private folder and fill it with `write`; its path is short enough for a socket.

    If this fails, the folder is removed, and `ConfigError` or `StorageError` is raised.
    """
    made = await in_thread(TemporaryFolder)
    folder = made.path

    def fill() -> None:
        if len(os.fsencode(folder / HUB_SOCKET)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigError(f"{folder}: too long for a socket's path; set TMPDIR to a shorter path")
        write(folder)

    try:
        await in_thread(fill)
    except BaseException as error:
        made.remove()
        if isinstance(error, OSError):
            words = f"{folder}: cannot be written: {error.strerror}"
            raise StorageError(f"{words}; free space, or set TMPDIR to another folder") from error
        raise
    return made


def write_files(folder: Path, make: MakeTrainer, shares: Sequence[Share]) -> None:
    """Write the files from which worker processes create their trainers."""
    (folder / MAKE_FILE).write_bytes(dump(make, "the model"))
    for number, share in enumerate(shares, 1):
        WorkerFiles(folder, number).put_share(share)


class WorkerFiles:
    """The files of one worker, in a separate folder."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder / worker_name(number)
        self._name = worker_name(number)
        self.job = self._folder / "job.json"
        self._names, self._y = self._folder / "inputs.json", self._folder / "y.npy"
        self._trainer = self._folder / "trainer"
        self._result = self._folder / "result"

    def put_share(self, share: Share) -> None:
        """Write the worker's data or trainer; raises `ConfigError` if it cannot be pickled."""
        self._folder.mkdir()
        if not isinstance(share, Dataset):
            self._trainer.write_bytes(dump(share, f"the trainer of {self._name}"))
            return
        inputs = share.features.arrays if isinstance(share.features, Inputs) else {"x": share.features}
        for number, array in enumerate(inputs.values()):
            np.save(self._input(number), array)
        if isinstance(share.features, Inputs):
            self._names.write_bytes(msgspec.json.encode(list(inputs)))
        if share.y is not share.features:
            np.save(self._y, share.y)

    def read_share(self) -> Share:
        """Read the worker's data or trainer; arrays are mapped from disk."""
        if self._trainer.exists():
            trainer: Share = load(self._trainer.read_bytes())
            return trainer
        features: Features = _mapped(self._input(0))
        if self._names.exists():
            names = msgspec.json.decode(self._names.read_bytes(), type=list[str])
            features = Inputs({name: _mapped(self._input(number)) for number, name in enumerate(names)})
        if self._y.exists():
            return Dataset(features, _mapped(self._y))
        return Dataset(features, features)  # type: ignore[arg-type]

    def _input(self, number: int) -> Path:
        return self._folder / f"x-{number}.npy"

    def put_result(self, content: bytes) -> None:
        """Write the worker's result: a pickled error, or empty content if it has succeeded."""
        part = self._result.with_suffix(".part")
        part.write_bytes(content)
        part.replace(self._result)

    def take_result(self) -> bytes | None:
        """Read and delete the worker's result; return `None` if the worker died without a result."""
        try:
            content = self._result.read_bytes()
            self._result.unlink()
        except FileNotFoundError:
            return None
        return content


def _mapped(path: Path) -> npt.NDArray[Any]:
    return np.asarray(np.load(path, mmap_mode="r"))
