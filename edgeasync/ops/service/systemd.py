"""Calls systemd's command-line tools."""

import subprocess
import time
from collections.abc import Callable

from edgeasync.errors import StorageError

ASK_S = 0.5
"""Seconds between two queries of a unit's state while waiting for it."""


class Systemd:
    """The machine's systemd or, with `of_user`, the current user's systemd."""

    def __init__(self, *, of_user: bool) -> None:
        self._systemctl = ["systemctl", *(["--user"] if of_user else [])]

    def reload(self) -> None:
        """Reload all unit files."""
        self._run(*self._systemctl, "daemon-reload")

    def make_user(self) -> None:
        """Create the users in `sysusers.d` that are missing."""
        self._run("systemd-sysusers")

    def start(self, unit: str) -> None:
        """Start or restart a unit, without waiting until it is ready."""
        # A hub can take minutes to listen, and only then is a unit of Type=notify ready.
        self._run(*self._systemctl, "restart", "--no-block", unit)

    def stop(self, unit: str) -> None:
        """Stop a unit and reset its failed state."""
        self._run(*self._systemctl, "stop", unit)
        self._run(*self._systemctl, "reset-failed", unit, must=False)

    def remove_user(self, user: str) -> None:
        """Delete a user that `make_user` created."""
        self._run("userdel", user, must=False)

    def status(self, unit: str) -> dict[str, str]:
        """Return properties of a unit, such as `ActiveState` and `StatusText`."""
        wanted = "LoadState,ActiveState,StatusText,MainPID,NRestarts,InvocationID"
        lines = self._run(*self._systemctl, "show", "--property", wanted, unit).splitlines()
        return dict(line.partition("=")[::2] for line in lines)

    def _run(self, *command: str, must: bool = True) -> str:
        """Run a command and return its output. With `must`, a failure raises `StorageError`."""
        shown = " ".join(command)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - no shell
        except OSError as error:
            raise StorageError(
                f"{shown}: {error.strerror}; edgeasync service needs systemd, so start the program by hand"
            ) from error
        if done.returncode and must:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise StorageError(f"{shown}: {said}; check that systemd runs and that this user may control it")
        return done.stdout


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait until a condition is true, at most `limit_s` seconds. Return whether it is true."""
    until_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(ASK_S)
    return True
