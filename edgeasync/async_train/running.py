"""What runs from `start` to `stop`, by `with` and by `async with`, and the folder of a run that nobody named."""

import asyncio
import atexit
from abc import ABC, abstractmethod
from typing import Any, Self

from edgeasync.temporary import TemporaryFolder


class Running(ABC):
    """Base of what runs; on a loop it starts and stops in a thread."""

    @abstractmethod
    def start(self) -> Any:
        """Begin."""

    @abstractmethod
    def stop(self) -> None:
        """End."""

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
            await asyncio.wait([starting])  # nothing interrupts its thread
            await asyncio.to_thread(self.stop)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)


def temporary_run() -> str:
    """Make a folder for a run that nobody resumes; it is removed when the program ends."""
    folder = TemporaryFolder("run-")
    atexit.register(folder.remove)
    return str(folder.path / "run")
