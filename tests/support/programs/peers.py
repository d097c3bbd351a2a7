"""Real peers for tests: a file of peers with their keys, and one of them as a process.

    python -m tests.support.programs.peers FOLDER NUMBER TOPOLOGY LEASE_S

The process trains nothing: its steps wait. It prints what its core reports, and writes its model when it ends.
"""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

import numpy as np

from edgeasync import Parameter, ParameterSpec, StepResult
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.identity import DeviceFolder
from edgeasync.durable.peers_file import PeerEntry, read_peers
from edgeasync.runtime.peer import PEER_MODEL_FILE, PeerMember, PeerModel, PeerRuntime
from edgeasync.runtime.peer_settings import PeerSection

SPEC = ParameterSpec((Parameter("weight", (40, 25)), Parameter("bias", (25,))))
FILE = "peers.toml"


class Still:
    """Takes steps that leave the model as it is."""

    spec = SPEC

    def begin(self, parameters):
        self.parameters = parameters

    def step(self):
        time.sleep(0.01)
        return StepResult(loss=1.0, examples=1)


def name_of(number):
    """Return a peer's name; names in order are numbers in order."""
    return f"peer-{number:02}"


def first_values(number):
    """Return the values that a peer begins with: no two have the same."""
    return np.random.default_rng(number).normal(size=SPEC.length).astype(np.float32)


def write_list(folder, numbers, address="ipc://{folder}/{number}"):
    """Write the file of these peers, and make their keys."""
    entries = [
        PeerEntry(
            name=name_of(number),
            address=address.format(folder=folder, number=number),
            key=DeviceKeys(folder / name_of(number)).own().public.hex(),
        )
        for number in numbers
    ]
    part = folder / "peers.part"
    part.write_text("peer = [\n" + "".join(f"{entry.text()},\n" for entry in entries) + "]\n")
    part.replace(folder / FILE)
    return entries


def make_peer(
    folder, number, *, incarnation=1, trainer=None, frozen_arrays=None, meets=False, on_report=None, **settings
):
    """Return a peer of the file by these settings; after an end it resumes its own model."""
    state = folder / name_of(number)
    peers = read_peers(folder / FILE)
    member = PeerMember(peers.of(name_of(number)), DeviceKeys(state).own(), peers, incarnation, folder / FILE)
    return PeerRuntime(
        member,
        PeerSection(**{"lease_s": 3.0, "round_every_s": 0.1} | settings),
        PeerModel(trainer or Still(), first_values(number), frozen=frozen_arrays),
        model_file=state / PEER_MODEL_FILE,
        meets=meets,
        on_report=on_report,
    )


def main():
    folder, number, topology, lease_s = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    identity = DeviceFolder(folder / name_of(number)).open(name_of(number))

    def tell(report):
        told = {"event": report.event, "peer": report.peer, "detail": report.detail}
        line = json.dumps(told | {"members": report.detail.partition(": ")[2]})
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    async def run():
        peer = make_peer(
            folder, number, topology=topology, lease_s=lease_s, incarnation=identity.incarnation, on_report=tell
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, peer.request_stop)
        await peer.run()

    asyncio.run(run())


if __name__ == "__main__":
    main()
