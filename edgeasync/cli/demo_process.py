"""A hub or an agent of the demo: the command of edgeasync, which ends when the demo does, however that ends.

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
    """Wait until nobody holds the other end of standard input; then end in order."""
    with contextlib.suppress(OSError):
        os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_the_demo, name="demo", daemon=True).start()
    main()
