"""A real device that goes and comes back: how much of a model it takes.

`python -m benchmarks.comeback --case returns` is the long form, which also holds it against a bound.
"""

import itertools
import signal

import numpy as np

from edgeasync.data import load_digits
from edgeasync.net.status import fetch_status
from edgeasync.training.numpy_models import MlpModel
from tests.support.programs.processes import PATIENCE_S, status_when

HIDDEN = 256
MODEL = MlpModel(inputs=64, hidden=(HIDDEN,), classes=10)
TABLE = f'kind = "mlp"\ninputs = 64\nhidden = [{HIDDEN}]\nclasses = 10'
SETTINGS = """
[liveness]
heartbeat_s = 0.5
lease_s = 2.0
[policy]
frequency = { kind = "fixed", local_steps = 4 }
[codec]
push = "int8"
"""


def returns(commands, times, *, versions, spool="full", step_s=0.02):
    """Let a device go and come back; return what it was sent until it trained again, in models of float32.

    It is asked to stop and killed in turns. Meanwhile another device makes as many versions.
    """
    digits = load_digits()
    data = commands.folder / "digits.npz"
    np.savez(data, x=digits.x, y=digits.y)
    hub, address = commands.hub(commands.settings(model=TABLE, more=SETTINGS, name=f"hub-{spool}"))
    stays = commands.agent(address, f"stays-{spool}", data=data, step_s=step_s)
    name = f"goes-{spool}"

    def start():
        return commands.agent(address, name, "--spool", spool, data=data, step_s=step_s)

    def device(status):
        return next((one for one in status["devices"] if one["id"] == name), None)

    goes, taken = start(), []
    for _, power_cut in zip(range(times), itertools.cycle((False, True))):
        updates = (device(fetch_status(address, PATIENCE_S)) or {"updates_applied": 0})["updates_applied"]
        status_when(
            address, lambda s, more=updates + 3: (device(s) or {"updates_applied": 0})["updates_applied"] >= more
        )
        if power_cut:
            goes.kill()
        else:
            goes.signal(signal.SIGTERM)
            goes.wait()
        gone = status_when(address, lambda s: device(s)["state"] in ("lost", "left"))
        status_when(address, lambda s, last=gone["version"] + versions: s["version"] >= last)
        before = device(fetch_status(address, PATIENCE_S))["bytes_down"]
        goes = start()
        goes.wait_for("joined")
        # The first bytes beyond headers are the assignment's, which may still be in flight.
        seen = status_when(address, lambda s, known=before: device(s)["bytes_down"] > known + 2000)
        taken.append((device(seen)["bytes_down"] - before) / MODEL.spec.nbytes)
    for one in (goes, stays, hub):
        one.signal(signal.SIGTERM)
        one.wait()
    return taken
