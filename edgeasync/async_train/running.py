"""Base class of objects with `start` and `stop`, and folders for temporary runs."""

import asyncio
import atexit
from abc import ABC, abstractmethod
from typing import Any, Self

from edgeasync.temporary import TemporaryFolder


class Running(ABC):
    """Base class of objects that `with` and `async with` start and stop.

    `async with` calls `start` and `stop` in a thread.
    """

    @abstractmethod
    def start(self) -> Any:
        """Start."""

    @abstractmethod
    def stop(self) -> None:
        """Stop."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        starting = asyncio.create_task(asyncio.to_thread(self.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])  # its thread cannot be interrupted
            await asyncio.to_thread(self.stop)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)


def temporary_run() -> str:
    """Create a folder for a run that is never resumed; it is deleted when the program ends."""
    folder = TemporaryFolder("run-")
    atexit.register(folder.remove)
    return str(folder.path / "run")
