"""Stands in for systemctl and systemd in a host of `tests.support.boards.hosts`: runs units of `Type=notify`.

    systemctl daemon-reload | reset-failed | start | stop | restart | show [OPTIONS] UNIT

It starts nothing again that has ended. Run by any Python, without a package.
"""

import json
import os
import pathlib
import pwd
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid

RUN = pathlib.Path("/run")
UNITS = pathlib.Path("/etc/systemd/system")
ENDS_WITHIN_S = 30.0


def read(unit):
    try:
        return json.loads((RUN / f"{unit}.json").read_text())
    except FileNotFoundError:
        return {}


def stop(unit):
    pid = read(unit).get("MainPID", 0)
    if not pid:
        return
    os.kill(pid, signal.SIGTERM)
    until_s = time.monotonic() + ENDS_WITHIN_S
    while read(unit).get("MainPID") and time.monotonic() < until_s:
        time.sleep(0.05)


def start(unit):
    lines = [line.partition("=") for line in (UNITS / unit).read_text().splitlines()]
    service = {key: value for key, _, value in lines}
    user = pwd.getpwnam(service["User"])
    state = pathlib.Path("/var/lib", service["StateDirectory"])
    state.mkdir(mode=0o700, exist_ok=True)
    for path in (state, *state.rglob("*")):
        os.chown(path, user.pw_uid, user.pw_gid)
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    watch(unit, service, user)
    os._exit(0)


def watch(unit, service, user):
    """Run the service to its end, and write down what it tells."""
    place = RUN / f"{unit}.socket"
    place.unlink(missing_ok=True)
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.bind(str(place))
    place.chmod(0o777)
    log = (RUN / f"{unit}.log").open("ab")
    process = subprocess.Popen(
        shlex.split(service["ExecStart"]), user=user.pw_uid, group=user.pw_gid, extra_groups=[],
        cwd=service["WorkingDirectory"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        env={"PATH": os.environ["PATH"], "HOME": user.pw_dir, "NOTIFY_SOCKET": str(place)},
    )  # fmt: skip
    for descriptor in (0, 1, 2):
        os.dup2(log.fileno(), descriptor)
    state = {"LoadState": "loaded", "ActiveState": "activating", "MainPID": process.pid, "NRestarts": 0,
             "StatusText": "", "InvocationID": uuid.uuid4().hex}  # fmt: skip
    told.settimeout(0.1)
    while True:
        replace(unit, state)
        try:
            line = told.recv(65536).decode()
        except TimeoutError:
            if process.poll() is not None:
                break
            continue
        if line == "READY=1":
            state["ActiveState"] = "active"
        elif line.startswith("STATUS="):
            state["StatusText"] = line.removeprefix("STATUS=")
    replace(unit, state | {"ActiveState": "inactive" if process.returncode == 0 else "failed", "MainPID": 0})


def replace(unit, state):
    part = RUN / f"{unit}.part"
    part.write_text(json.dumps(state))
    part.replace(RUN / f"{unit}.json")


def main(words):
    verb, *rest = [word for word in words if not word.startswith("-") and "," not in word]
    unit = rest[-1].removesuffix(".service") + ".service" if rest else ""
    if verb in ("stop", "restart"):
        stop(unit)
    if verb in ("start", "restart"):
        start(unit)
    if verb == "show":
        found = read(unit) or {"LoadState": "loaded", "ActiveState": "inactive"}
        sys.stdout.write("".join(f"{key}={value}\n" for key, value in found.items()))


main(sys.argv[1:])
