"""Faults that need the system's help: system calls that fail or kill, file systems that are full or read-only."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

STRACE = shutil.which("strace")


def injecting(calls, what):
    """Return the command under which a hub's system calls are tampered with, each thread's counted by itself.

    Of the `calls` those that a machine does not have are left out.
    """
    names = ",".join(f"?{call}" for call in calls.split(","))
    return (STRACE, "-f", "-qq", "-o", os.devnull, "-e", f"trace={names}", "-e", f"inject={names}:{what}")


def _can_trace():
    if STRACE is None:
        return False
    return not subprocess.run(
        [*injecting("fdatasync", "error=EIO"), "true"], capture_output=True, check=False
    ).returncode


needs_strace = pytest.mark.skipif(not _can_trace(), reason="strace is missing, or may not trace here")


class SmallDisk:
    """A file system of its own, in memory, that can be filled, made read-only and healed."""

    def __init__(self, folder, size):
        self.folder = Path(folder)
        self.folder.mkdir()
        self._call("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", self.folder)

    def remount(self, options):
        """Change its size."""
        self._call("mount", "-o", f"remount,{options}", self.folder)

    def fill(self):
        """Take up all the space that is left; return the file that does."""
        path = self.folder / "filler"
        with path.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return path

    def close(self):
        """Unmount it and its cover, even if a process still uses it."""
        while self.folder.is_mount():
            self.uncover()

    def cover(self):
        """Cover it by a read-only view: files that are opened from now on cannot be written."""
        self._call("mount", "--bind", self.folder, self.folder)
        self._call("mount", "-o", "remount,bind,ro", self.folder)

    def uncover(self):
        """Take away the last cover."""
        self._call("umount", "-l", self.folder)

    @staticmethod
    def _call(*command):
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
