"""Running a hub or an agent until it ends or somebody ends it."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Protocol

import uvloop

IMPATIENCE_S = 1.0


class Service(Protocol):
    """A hub or an agent."""

    async def run(self) -> str:
        """Serve; return why it ended."""

    def request_stop(self) -> None:
        """Make `run` return soon."""


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a command cleanly, SIGHUP among them unless it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] if ignored else [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def serve(service: Service, every_s: float, on_progress: Callable[[], None]) -> str:
    """Run `service` on uvloop until it ends; return its reason.

    SIGTERM, Ctrl-C and SIGHUP ask it to stop. A second SIGTERM or Ctrl-C, more than a second later, ends the
    process at once. `on_progress` is called every `every_s` seconds meanwhile.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(service, every_s, on_progress))


async def _serve(service: Service, every_s: float, on_progress: Callable[[], None]) -> str:
    loop = asyncio.get_running_loop()

    stopping = False

    def stop() -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            # Some wrappers send one Ctrl-C twice: only a later one means impatience.
            loop.call_later(IMPATIENCE_S, let_signals_kill)
            service.request_stop()

    def let_signals_kill() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    async def progress() -> None:
        while True:
            await asyncio.sleep(every_s)
            on_progress()

    for number in ending_signals():
        loop.add_signal_handler(number, stop)
    ticking = asyncio.create_task(progress())
    running: Awaitable[str] = service.run()
    try:
        return await running
    finally:
        ticking.cancel()
