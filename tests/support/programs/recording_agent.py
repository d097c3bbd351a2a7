"""A program of devices that write down all they are told, to be compared with the hub.

Each device's k-th update adds `shares_of(k)` to three places of its own in the model, all exact in float32 under
`immediate` with plain codecs. So the acknowledged updates determine the model. The record outlives the process,
since every line is one write.

    recording_agent.py HUB FOLDER FIRST LAST STEP_S
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import uvloop
import xxhash
import zmq

from edgeasync import StepResult
from edgeasync.core.hub.codec_agreement import COARSE
from edgeasync.durable.identity import DeviceFolder
from edgeasync.net.network import ZmqNetwork
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.agent_settings import AgentSection, AgentSettings
from edgeasync.runtime.device import Device as OwnDevice
from edgeasync.runtime.workload import Workload

PLACES = 3
GROUPS = 100
"""Of a crowd, devices with the same number modulo this share their places of the model."""


def shares_of(k):
    """Return what a device's k-th update adds: three small integers that tell it from its neighbours."""
    return 1, 1 + k % 127, 1 + k * k % 113


class Record:
    """Appends lines to a file; the updates are numbered over all starts of a device."""

    def __init__(self, path):
        self.made = 0
        if path.exists():
            lines = path.read_text().splitlines()
            self.made = max([json.loads(line).get("made", 0) for line in lines], default=0)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, **values):
        """Write a line, with the time on the machine's clock."""
        os.write(self._file, (json.dumps({"at_s": time.monotonic()} | values) + "\n").encode())

    def close(self):
        """Let go of the file."""
        os.close(self._file)


class Recorder:
    """A `Trainer` of one device: notes the model it is given, and the update it makes of it."""

    def __init__(self, device, spec):
        self.spec = spec
        self._device = device
        self._parameters = None
        self._off_chain = False

    def begin(self, parameters):
        """Note which version this is, and what it is."""
        held, assignment = self._device.agent.engine._model, self._device.agent.core.work._installing
        if assignment.deltas is None:
            self._off_chain = assignment.codec == COARSE
        version, digest = held.version, xxhash.xxh3_64_hexdigest(held.base.data)
        self._device.record.note(
            lineage=version.lineage, number=version.number, digest=digest, off_chain=self._off_chain
        )
        self._parameters = parameters

    def step(self):
        """Add the next shares with the first step of an assignment."""
        if self._parameters is not None:
            record, first = self._device.record, self._device.first
            record.made += 1
            record.note(made=record.made)
            self._parameters[first : first + PLACES] += shares_of(record.made)
            self._parameters = None
        return StepResult(1.0, 1)


class Device:
    """One agent with a state folder and a record of its own."""

    def __init__(self, hub, folder, number, step_s, network):
        self.first = PLACES * number
        self._state = DeviceFolder(folder / f"device-{number}")
        identity = self._state.open(f"device-{number}")
        self.record = Record(folder / f"device-{number}.jsonl")
        self.record.note(start=identity.incarnation)
        section = AgentSection(hub=hub, step_s_min=step_s)
        self.agent = AgentRuntime(
            AgentSettings(agent=section), OwnDevice(identity.device_id).open(identity, section),
            Workload(lambda welcome: Recorder(self, welcome.spec)), on_report=self._on_report, network=network,
        )  # fmt: skip

    def _on_report(self, report):
        if report.event == "answered":
            self.record.note(told=report.detail)
        else:
            self.record.note(event=report.event, detail=report.detail)


async def run(hub, folder, first, last, step_s):
    """Run the devices `first` to `last` until their hub has finished."""
    network = ZmqNetwork()
    network.context.set(zmq.MAX_SOCKETS, 16_000)
    devices = [Device(hub, folder, number, step_s, network) for number in range(first, last)]
    sys.stdout.write('{"event": "started"}\n')
    sys.stdout.flush()
    await asyncio.gather(*[device.agent.run() for device in devices])
    network.close()


if __name__ == "__main__":
    address, where, *numbers = sys.argv[1:]
    uvloop.run(run(address, Path(where), int(numbers[0]), int(numbers[1]), float(numbers[2])))
