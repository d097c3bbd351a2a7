"""Runs commands and Python calls under the audit hook of `audit/`, each in a fork of its own.

    python -m tests.support.security.audited STEPS.json RESULTS.json

A step is a list: the arguments of a command, or `["python", CODE]`.
"""

import contextlib
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import zmq

from edgeasync.cli.main import run_command
from edgeasync.errors import EdgeAsyncError

ROOT = Path(__file__).parents[3]
MODULES = (
    "onnx",
    "onnxruntime",
    "edgeasync.sdk.train",
    "edgeasync.cli.main",
    "edgeasync.cli.hub",
    "edgeasync.cli.demo",
)
AUDIT = Path(__file__).with_name("audit")


def audited(steps, folder, *searched, fresh=None):
    """Run steps in a folder; modules are searched in the folders `searched`, too. Return results and the log.

    Each step finds the folder `fresh` as it is now.
    """
    paths = {name: folder / name for name in ("steps.json", "results.json", "audit.log")}
    kept = None
    if fresh is not None:
        kept = folder / "fresh"
        shutil.copytree(fresh, kept, symlinks=True)
    told = {"steps": [[str(part) for part in step] for step in steps], "kept": str(kept), "fresh": str(fresh)}
    paths["steps.json"].write_text(json.dumps(told))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (AUDIT, ROOT, *searched))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "AUDIT_LOG": str(paths["audit.log"]),
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
    }
    for name in ("home", "tmp"):
        (folder / name).mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "tests.support.security.audited",
        str(paths["steps.json"]),
        str(paths["results.json"]),
    ]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    noted = [json.loads(line) for line in paths["audit.log"].read_text().splitlines()]
    return json.loads(paths["results.json"].read_text()), noted


def main():
    """Run the steps, and write what came of each: an exit code, and what was printed."""
    sitecustomize = importlib.import_module("sitecustomize")
    for module in MODULES:  # once, before the forks
        importlib.import_module(module)

    def bind(socket, address):
        sitecustomize.note("bind", address)
        return bound(socket, address)

    bound, zmq.Socket.bind = zmq.Socket.bind, bind
    told, results = json.loads(Path(sys.argv[1]).read_text()), []
    for step in told["steps"]:
        if told["fresh"] != "None":  # by programs that are not audited
            subprocess.run(["rm", "-rf", told["fresh"]], check=True)
            subprocess.run(["cp", "-a", told["kept"], told["fresh"]], check=True)
        results.append(forked(step))
    Path(sys.argv[2]).write_text(json.dumps(results))


def forked(step):
    """Run a step in a fork; return its exit code, and what was printed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        printed, code = io.StringIO(), 1
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                code = call(step)
        except BaseException as error:  # noqa: BLE001
            printed.write(f"Traceback: {type(error).__name__}: {error}")
        with os.fdopen(writing, "w") as out:
            json.dump([code, printed.getvalue()], out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        result = json.load(answer)
    os.waitpid(pid, 0)
    return result


def call(step):
    if step[0] != "python":
        sys.argv = ["edgeasync", *step]
        return run_command()
    try:
        exec(compile(step[1], "<call>", "exec"), {})
    except EdgeAsyncError as error:
        sys.stdout.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    main()
