"""Scripts whose loop has joined, killed and run again."""

import os
import subprocess
import sys
import threading

import edgeasync
from edgeasync import Hub
from tests.support.programs.processes import PATIENCE_S

LIMIT_S = 300.0


def kill_and_come_back(script, module, folder):
    """Run a script that joins, kill it, run it again; return its last line and the steps that its hub counted."""
    counted, kill = [], threading.Event()

    class Watch:
        def on_update(self, update):
            counted.append(update.local_steps)
            if len(counted) == 12:
                kill.set()

    hub = Hub(
        edgeasync.torch.model(module),
        run=folder / "run",
        bind="tcp://127.0.0.1:*",
        settings={"hub": {"quiet": False}},
        callbacks=[Watch()],
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with hub:
        command = [sys.executable, str(script), hub.address, "mine", str(folder / "device")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as first:
            assert kill.wait(2 * PATIENCE_S)
            first.kill()
        found = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=LIMIT_S, env=environment, cwd=folder
        )
    return found.stdout.splitlines()[-1], sum(counted)
