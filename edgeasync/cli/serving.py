"""Running a hub or an agent until it ends or somebody ends it."""

import asyncio
import contextlib
import faulthandler
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from edgeasync.cli.options import one_of
from edgeasync.cli.output import tell, visible
from edgeasync.cli.under_systemd import goes_to_journal, with_priority
from edgeasync.durable.files import replace_file
from edgeasync.errors import EdgeAsyncError, StorageError
from edgeasync.host.event_loop import check_threads, loop_factory
from edgeasync.host.notify import Notifier

IMPATIENCE_S = 1.0

FED_TIMES = 4
"""How often the watchdog is fed in the time that systemd waits: a busy machine may be late."""

LAST_EVENTS_FILE = "last-events.txt"
LINES_SHOWN = 20


LOG_LEVELS = ("debug", "info", "warning", "error")


def log_to_stderr(level: str | None) -> None:
    """Write the log from this level on to standard error; raises `ConfigError` for a level that is not known.

    Without one everything stays as Python has it: warnings are written.
    """
    if level is None:
        return
    one_of("--log-level", level, LOG_LEVELS)
    handler = logging.StreamHandler()
    clock = "" if goes_to_journal(sys.stderr) else "%(asctime)s "
    handler.setFormatter(_LineFormatter(f"{clock}%(name)s %(message)s", "%Y-%m-%dT%H:%M:%S%z"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _LineFormatter(logging.Formatter):
    """Keeps control characters, which a peer may have written, out of the log: a message is one line of text.

    A line for systemd's journal begins with its priority.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not goes_to_journal(sys.stderr):
            return text
        return with_priority(
            text, 3 if record.levelno >= logging.ERROR else 4 if record.levelno >= logging.WARNING else 6
        )

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(map(visible, super().formatException(ei).split("\n")))


class Servable(Protocol):
    """A hub or an agent."""

    async def run(self) -> str:
        """Serve; return why it ended."""

    def request_stop(self) -> None:
        """Make `run` return soon."""

    def last_events(self) -> list[str]:
        """Return the last events and effects of the core, a line each."""


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a command cleanly, SIGHUP among them unless it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] if ignored else [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def serve(
    service: Servable,
    every_s: float,
    on_progress: Callable[[], None],
    folder: Path | None = None,
    *,
    notifier: Notifier | None = None,
    hangs: Callable[[], str] = str,
) -> str:
    """Run `service` until it ends, on uvloop if possible; return its reason.

    SIGTERM, Ctrl-C and SIGHUP ask it to stop. A second SIGTERM or Ctrl-C, more than a second later, ends the
    process at once. `on_progress` is called every `every_s` seconds meanwhile. An unexpected error writes the last
    events of the core to `folder`.

    The loop feeds systemd's watchdog, unless `hangs` returns a sentence about what hangs beside the loop.
    """
    check_threads()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_serve(service, every_s, on_progress, notifier or Notifier(), hangs))
    except Exception as error:
        expected = isinstance(error, EdgeAsyncError) and error.exit_code != EdgeAsyncError.exit_code
        if not expected:
            _leave_last_events(service, folder)
        raise


def _leave_last_events(service: Servable, folder: Path | None) -> None:
    """Write the last events into the folder and show the newest of them; without a folder show them all."""
    lines = service.last_events()
    if not lines:
        return
    shown, where = lines, ""
    if folder is not None and folder.is_dir():
        with contextlib.suppress(StorageError):
            replace_file(folder / LAST_EVENTS_FILE, "\n".join([*lines, ""]).encode(errors="backslashreplace"))
            shown, where = lines[-LINES_SHOWN:], f"; all are in {folder / LAST_EVENTS_FILE}"
    told = [f"edgeasync: the last events before the error{where}:", *shown]
    tell("\n".join(map(visible, told)))


async def _serve(
    service: Servable,
    every_s: float,
    on_progress: Callable[[], None],
    notifier: Notifier,
    hangs: Callable[[], str],
) -> str:
    loop = asyncio.get_running_loop()

    stopping = False

    def stop() -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            notifier.stopping()
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
    tasks = [asyncio.create_task(progress())]
    if notifier.watchdog_s is not None:
        tasks.append(asyncio.create_task(_feed(notifier, notifier.watchdog_s / FED_TIMES, hangs)))
    running: Awaitable[str] = service.run()
    try:
        return await running
    finally:
        for task in tasks:
            task.cancel()


async def _feed(notifier: Notifier, period_s: float, hangs: Callable[[], str]) -> None:
    """Feed the watchdog for as long as nothing hangs, from the loop, so that one that hangs does not."""
    faulthandler.enable()  # systemd ends what hangs by SIGABRT: then the log shows where each thread was
    while True:
        if trouble := hangs():
            notifier.status(trouble)
        else:
            notifier.alive()
        await asyncio.sleep(period_s)
