"""Processes of a benchmark that talk with it through pipes, and end with it."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, Self

PATIENCE_S = 60.0
"""How long a process may take to say something."""


class Child:
    """A process and our end of its pipe, which is the last argument of its function."""

    def __init__(
        self, context: ForkServerContext | SpawnContext, target: Callable[..., None], *arguments: object
    ) -> None:
        self.pipe: Connection[Any, Any]
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, patience_s: float = PATIENCE_S) -> Any:
        """Return the next thing that the process says; one that has failed has said why on standard error."""
        if not self.pipe.poll(patience_s):
            raise TimeoutError(f"{self.process.name} does not answer")
        try:
            return self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.process.name} has failed") from None

    def ask(self) -> Any:
        """Ask a process for what it measured since the last question."""
        self.pipe.send(None)
        return self.hear()

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.join()


class Children:
    """Processes that begin with these modules imported; all are killed on leaving.

    A folder in which they write has to outlive them: make it before.
    """

    def __init__(self, *preloaded: str) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preloaded))
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()

    def start(self, target: Callable[..., None], *arguments: object) -> Child:
        """Start a process."""
        child = Child(self._context, target, *arguments)
        self._children.append(child)
        return child
