"""A hub or agent of the demo. It exits when the demo exits, even if the demo was killed.

    python -m edgeasync.cli.demo_process ARGUMENT...

Its standard input is a pipe to the demo.
"""

import contextlib
import os
import signal
import sys
import threading

from edgeasync.cli.main import main


def end_with_the_demo() -> None:
    """Wait until the other end of standard input is closed, then exit with SIGTERM."""
    with contextlib.suppress(OSError):
        os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_the_demo, name="demo", daemon=True).start()
    main()
