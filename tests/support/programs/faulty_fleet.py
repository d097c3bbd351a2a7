"""A fleet of real agents, of which some have faults: a seed draws which, and how bad they are."""

import contextlib
import random
import time

import numpy as np

from benchmarks.link_proxy import proxied
from edgeasync.core.hub.attention import find_attention
from edgeasync.data import iid, load_digits
from edgeasync.net.status import fetch_status
from edgeasync.protocol.status import read_status
from tests.support.programs.processes import PATIENCE_S, status_when

DEVICES = 30
LOOK_S = 2.0
"""Time between two looks at the status."""

NAMED_BY = {
    "slow link": r"slow link",
    "hot": r"\bhot\b",
    "shuffled labels": r"does not fit its data",
    "inputs x1000": r"inputs",
    "dead": r"lost",
    "stuck in joining": r"without a local step",
    "20 times slower": r"slow: ",
}
"""The faults, and what the words about such a device must contain."""

MODEL_TABLE = 'kind = "mlp"\ninputs = 64\nhidden = [32]\nclasses = 10'
STEP_S = (0.04, 0.06)
"""Time of a local step of a device, from the fastest to the slowest."""

LINK_BYTES_PER_S = (1000, 4000)
HOT_C = (76.0, 79.0), (81.0, 90.0)
"""Temperatures at which a device trains half of the time, or pauses."""

HOT = """
import functools, pathlib
from edgeasync.host import sensing
sensing.make_sense = functools.partial(sensing.make_sense, pathlib.Path({root!r}))
from edgeasync.cli.main import main
main()
"""

HANGING = """
import time

import numpy as np

from edgeasync.training.numpy_models import MlpModel


class Hanging:
    "Never completes a local step."

    spec = MlpModel(inputs=64, hidden=(32,), classes=10).spec

    def begin(self, parameters):
        pass

    def step(self):
        time.sleep(3600)


def make_trainer(welcome, dataset):
    return Hanging()
"""


class FaultyFleet:
    """A hub and `DEVICES` agents with default settings. `faulty` maps each fault to its device."""

    def __init__(self, commands, seed, faults=tuple(NAMED_BY)):
        self._commands, self._folder = commands, commands.folder
        self._random = random.Random(seed)
        names = [f"pi-{number:02}" for number in range(DEVICES)]
        self.faulty = dict(zip(faults, self._random.sample(names, len(faults)), strict=True))
        self._names, self._seed = names, seed
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        settings = self._commands.settings(model=MODEL_TABLE, more="")
        self.hub, self.address = self._commands.hub(settings)
        self._proxy = self._stack.enter_context(proxied(self.address))
        self._proxy.up.bytes_per_s = self._proxy.down.bytes_per_s = self._random.uniform(*LINK_BYTES_PER_S)
        self.agents = {}
        fault_of = {name: fault for fault, name in self.faulty.items()}
        for name, part in zip(self._names, iid(load_digits(), DEVICES, self._seed), strict=True):
            self.agents[name] = self._start(name, part, fault_of.get(name, ""))
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _start(self, name, part, fault):
        x, y, step_s, address, options = part.x, part.y, self._random.uniform(*STEP_S), self.address, {}
        flags = ["--data", self._folder / f"{name}.npz"]
        if fault == "shuffled labels":
            y = np.random.default_rng(self._seed).permutation(y)
        elif fault == "inputs x1000":
            x = 1000.0 * x
        elif fault == "20 times slower":
            step_s *= 20.0
        elif fault == "slow link":
            address = self._proxy.address
        elif fault == "hot":
            zone = self._folder / "hot/sys/class/thermal/thermal_zone0"
            zone.mkdir(parents=True)
            (zone / "type").write_text("cpu-thermal\n")
            (zone / "temp").write_text(f"{1000 * self._random.uniform(*self._random.choice(HOT_C)):.0f}\n")
            options["program"] = ("-c", HOT.format(root=str(self._folder / "hot")))
        elif fault == "stuck in joining":
            (self._folder / "hanging.py").write_text(HANGING)
            flags = ["--trainer", "hanging:make_trainer"]
        np.savez(self._folder / f"{name}.npz", x=x.astype(np.float32), y=y)
        return self._commands.start(
            "agent", "--hub", address, *flags, "--device-id", name, "--state", self._folder / name,
            "--step-s-min", step_s, "--json", **options,
        )  # fmt: skip

    def begin(self):
        """Wait until all devices have joined, then kill the one that is to be dead."""
        status_when(self.address, lambda status: len(status["devices"]) == DEVICES, "all devices")
        if "dead" in self.faulty:
            self.agents[self.faulty["dead"]].kill()
        self.begun_s = time.monotonic()

    def watch(self, seconds):
        """Yield for some time how long the faults have lasted, and the words about each device."""
        while (passed_s := time.monotonic() - self.begun_s) < seconds:
            status = read_status(fetch_status(self.address, PATIENCE_S, watch=True))
            yield passed_s, {one.device: one.words for one in find_attention(status)}
            time.sleep(LOOK_S)
