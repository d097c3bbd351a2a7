"""Asking systemd for something, by its own commands."""

import subprocess
import time
from collections.abc import Callable

from edgeasync.errors import StorageError

ASK_S = 0.5
"""How often the state of a unit is asked for while somebody waits for it."""


class Systemd:
    """systemd of the machine, or of the user who calls."""

    def __init__(self, *, of_user: bool) -> None:
        self._systemctl = ["systemctl", *(["--user"] if of_user else [])]

    def reload(self) -> None:
        """Read all units again."""
        self._run(*self._systemctl, "daemon-reload")

    def make_user(self) -> None:
        """Make the users that `sysusers.d` names, unless they are there."""
        self._run("systemd-sysusers")

    def start(self, unit: str) -> None:
        """Start a unit; one that runs is started again."""
        # A unit of Type=notify is ready when a hub listens: that may take minutes, for which nobody waits here.
        self._run(*self._systemctl, "restart", "--no-block", unit)

    def stop(self, unit: str) -> None:
        """Stop a unit, and forget that it failed."""
        self._run(*self._systemctl, "stop", unit)
        self._run(*self._systemctl, "reset-failed", unit, must=False)

    def remove_user(self, user: str) -> None:
        """Remove a user that `make_user` made."""
        self._run("userdel", user, must=False)

    def status(self, unit: str) -> dict[str, str]:
        """Return the unit's `LoadState`, `ActiveState`, `StatusText`, `MainPID`, `NRestarts`, `InvocationID`."""
        wanted = "LoadState,ActiveState,StatusText,MainPID,NRestarts,InvocationID"
        lines = self._run(*self._systemctl, "show", "--property", wanted, unit).splitlines()
        return dict(line.partition("=")[::2] for line in lines)

    def _run(self, *command: str, must: bool = True) -> str:
        """Return what a command prints; raises `StorageError` if it fails, or is not there, unless it may."""
        shown = " ".join(command)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - no shell
        except OSError as error:
            raise StorageError(
                f"{shown}: {error.strerror}; edgeasync service needs systemd: without it start the agent by hand"
            ) from error
        if done.returncode and must:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise StorageError(f"{shown}: {said}; look at the rights of this user, and at systemd")
        return done.stdout


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Return whether a condition is true within `limit_s` seconds."""
    until_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(ASK_S)
    return True
