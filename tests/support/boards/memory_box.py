"""A control group that limits the memory of one command, as the memory of a small board does."""

import os
import uuid
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class MemoryBox:
    """A group of processes with at most `nbytes` of memory, and no swap space.

    Start a command `under` it. Raises `OSError` where groups cannot be made.
    """

    def __init__(self, nbytes):
        first = (ROOT / "memory").is_dir()  # of the two versions of the kernel's interface
        if not first and "memory" not in (control := ROOT / "cgroup.subtree_control").read_text():
            control.write_text("+memory")
        self._folder = ROOT / ("memory" if first else ".") / f"edgeasync-{uuid.uuid4().hex}"
        self._folder.mkdir()
        try:
            (self._folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(nbytes))
            swap = self._folder / ("memory.memsw.limit_in_bytes" if first else "memory.swap.max")
            if swap.exists():
                swap.write_text(str(nbytes if first else 0))
        except OSError:
            self.close()
            raise
        self.under = ("sh", "-c", f'echo $$ > "{self._folder / "cgroup.procs"}" && exec "$0" "$@"')

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Remove the group. Its processes must have ended."""
        os.rmdir(self._folder)  # noqa: PTH106 - the kernel's own files stay in it
