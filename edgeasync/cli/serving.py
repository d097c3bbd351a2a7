"""Runs a hub or an agent until it ends or is stopped by a signal."""

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
"""Number of watchdog pings per systemd timeout. Several pings are sent, because a busy machine may
delay some.
"""

LAST_EVENTS_FILE = "last-events.txt"
LINES_SHOWN = 20


LOG_LEVELS = ("debug", "info", "warning", "error")


def log_to_stderr(level: str | None) -> None:
    """Log lines of this level and above to standard error.

    Without a level, log only warnings and errors, without time and logger, as Python does by default.
    Raises `ConfigError` for an unknown level.
    """
    handler = logging.StreamHandler()
    if level is None:
        handler.setFormatter(_LineFormatter("%(message)s"))
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
        return
    one_of("--log-level", level, LOG_LEVELS)
    clock = "" if goes_to_journal(sys.stderr) else "%(asctime)s "
    handler.setFormatter(_LineFormatter(f"{clock}%(name)s %(message)s", "%Y-%m-%dT%H:%M:%S%z"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _LineFormatter(logging.Formatter):
    """Escapes control characters in log messages, which may contain text from the network.

    A line for systemd's journal starts with its priority.
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
        """Run the service, and return why it ended."""

    def request_stop(self) -> None:
        """Make `run` return soon."""

    def last_events(self) -> list[str]:
        """Return the core's last events and effects, one per line."""


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a command cleanly.

    SIGHUP is omitted if it is ignored, as under nohup.
    """
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
    """Run `service` until it ends, on uvloop if installed, and return why it ended.

    SIGTERM, Ctrl-C and SIGHUP request a clean stop. A second SIGTERM or Ctrl-C after more than a
    second ends the process at once. `on_progress` is called every `every_s` seconds. On an
    unexpected error, the core's last events are written to `folder`.

    The event loop pings systemd's watchdog while `hangs` returns "". If `hangs` returns a text, the
    loop reports it as the service's status instead.
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
    """Write the last events to the folder and print the newest. Without a folder, print all of them."""
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
            # Some wrappers send Ctrl-C twice, so only a later one ends the process at once.
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
    """Ping the watchdog while nothing hangs.

    Runs on the event loop, so a blocked loop sends no pings.
    """
    faulthandler.enable()  # systemd ends a hanging process with SIGABRT; then the log shows all threads
    while True:
        if trouble := hangs():
            notifier.status(trouble)
        else:
            notifier.alive()
        await asyncio.sleep(period_s)
