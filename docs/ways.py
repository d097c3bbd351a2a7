"""Count the files that a reader passes on two ways through the package: `python -m docs.ways`.

One way is from `edgeasync agent` to its first message, the other from a push that a hub receives to the fold. A
file counts if at least one of its functions is called.
"""

import asyncio
import contextlib
import io
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np

from edgeasync import Agent, Hub, Stop
from edgeasync.cli.main import run_command
from edgeasync.training.numpy_models import SoftmaxModel

PACKAGE = Path(sys.modules["edgeasync"].__file__ or "").parent
IS_FUNCTION = 0x1
"""A code object's flag that the bodies of modules and classes lack."""


class Way:
    """Counts calls, on all threads that begin meanwhile, from the last of `first`, if it is named, to `last`."""

    def __init__(self, first: str, last: str) -> None:
        self.calls = 0
        self.files: set[str] = set()
        self._first, self._last = first, last
        self._on = not first
        self.ended = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """See what a thread does."""
        code = frame.f_code
        ours = code.co_filename.startswith(str(PACKAGE)) and code.co_flags & IS_FUNCTION
        if event != "call" or not ours or self.ended:
            return
        if code.co_qualname == self._first:
            self._on, self.calls = True, 0
            self.files.clear()
        if not self._on:
            return
        self.calls += 1
        self.files.add(str(Path(code.co_filename).relative_to(PACKAGE)))
        self.ended = code.co_qualname == self._last


def follow(way: Way, run: Callable[[], object]) -> Way:
    """Follow a way while something runs; return it."""
    threading.setprofile(way)
    sys.setprofile(way)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return way


MODEL = SoftmaxModel(inputs=4, classes=2)
DATA = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])


def way_of_an_agent(folder: Path) -> Way:
    """Follow `edgeasync agent` to the first message that it sends."""
    data = folder / "data.npz"
    np.savez(data, x=DATA[0], y=DATA[1])
    with Hub(MODEL, run=folder / "agents", bind="tcp://127.0.0.1:*", until=Stop(updates=3)) as hub:
        folders = ["--data", str(data), "--state", str(folder / "device")]
        sys.argv = ["edgeasync", "agent", "--hub", hub.address, *folders]

        def run() -> None:
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
                run_command()

        return follow(Way("", "Channel.send"), run)


def way_of_a_push(folder: Path) -> Way:
    """Follow what a hub does with a push, until it is part of a version."""
    address = f"ipc://{folder}/hub"

    async def serve() -> None:
        async with Hub(MODEL, run=folder / "pushes", bind=address, until=Stop(updates=3)) as hub:
            await hub.wait_async()

    with Agent(address, DATA, state=folder / "pusher"):
        return follow(Way("HubListener._on_message", "HubModel.fold"), lambda: asyncio.run(serve()))


def main() -> None:
    """Print both ways."""
    with tempfile.TemporaryDirectory() as folder:
        for name, way in (("agent", way_of_an_agent), ("push", way_of_a_push)):
            found = way(Path(folder))
            sys.stdout.write(f"{name}: {len(found.files)} files, {found.calls} calls\n")
            sys.stdout.writelines(f"  {file}\n" for file in sorted(found.files))


if __name__ == "__main__":
    main()
