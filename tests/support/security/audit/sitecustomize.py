"""Found by every interpreter whose PYTHONPATH has this folder: writes down what it runs, writes and listens on.

A line of JSON for each, in the file that `AUDIT_LOG` names: the code that runs (`exec`), a path that is written
(`write`), and an address that is listened on (`bind`).
"""

import json
import os
import sys

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate")
IN_FOLDER = ("os.remove", "os.mkdir", "os.rmdir")
"""Changes whose last argument may be the descriptor of the folder that a relative path is in."""
LOG = os.open(os.environ["AUDIT_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def note(what, value):
    os.write(LOG, json.dumps([what, os.fsdecode(value)]).encode() + b"\n")


def audit(event, arguments):
    if event == "exec":
        note("exec", getattr(arguments[0], "co_filename", "<none>"))
    elif event == "open":
        path, _, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) and not isinstance(path, int):
            note("write", os.path.abspath(path))  # noqa: PTH100 - links stay as they are
    elif event in CHANGES:
        within = event in IN_FOLDER and arguments[-1] >= 0
        folder = os.readlink(f"/proc/self/fd/{arguments[-1]}") if within else ""  # noqa: PTH115
        for path in arguments[:2]:
            if isinstance(path, str | bytes | os.PathLike):
                note("write", os.path.abspath(os.path.join(folder, os.fsdecode(path))))  # noqa: PTH100, PTH118
    elif event == "socket.bind":
        note("bind", repr(arguments[1]))


sys.addaudithook(audit)
