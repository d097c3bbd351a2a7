"""The private folder by which `train` and its worker processes hand things to each other."""

from pathlib import Path

import numpy as np

from edgeasync.data.dataset import Dataset
from edgeasync.sdk.shares import Share
from edgeasync.sdk.workers.base import worker_name
from edgeasync.sdk.workers.pickling import dump

MAKE_FILE = "make-trainer"
"""What makes a trainer from examples, the same for all workers."""


class WorkerFiles:
    """The files of one worker, in a folder of its own."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder / worker_name(number)
        self._name = worker_name(number)
        self.job = self._folder / "job.json"
        self.x, self.y = self._folder / "x.npy", self._folder / "y.npy"
        self.trainer = self._folder / "trainer"
        self._result = self._folder / "result"

    def put_share(self, share: Share) -> None:
        """Write what the worker trains with; raises `ConfigError` for a trainer that cannot be handed over."""
        self._folder.mkdir()
        if not isinstance(share, Dataset):
            self.trainer.write_bytes(dump(share, f"the trainer of {self._name}"))
            return
        np.save(self.x, share.x)
        if share.y is not share.x:
            np.save(self.y, share.y)

    def put_result(self, content: bytes) -> None:
        """Write how the worker ended: by an error or, without content, well."""
        part = self._result.with_suffix(".part")
        part.write_bytes(content)
        part.replace(self._result)

    def take_result(self) -> bytes | None:
        """Return how it ended, `None` if it died, and forget that."""
        try:
            content = self._result.read_bytes()
            self._result.unlink()
        except FileNotFoundError:
            return None
        return content
