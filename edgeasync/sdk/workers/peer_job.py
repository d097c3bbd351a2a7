"""Settings that `train` passes to a worker in a run without a hub."""

from pathlib import Path

import msgspec
import numpy as np

from edgeasync.durable.keys import KeyPair
from edgeasync.durable.peers_file import Peers
from edgeasync.runtime.peer import PEER_MODEL_FILE, PeerMember, PeerModel, PeerRuntime, longest_end_s
from edgeasync.runtime.peer_settings import PeerSection
from edgeasync.sdk.workers.base import worker_name
from edgeasync.training.trainer import Trainer

INITIAL_FILE = "initial.npy"


class PeerJob(msgspec.Struct, frozen=True, kw_only=True, tag="peer"):
    """The number of a worker and its peers; `secret` is the worker's own private key."""

    number: int
    incarnation: int
    seed: int
    threads: int = 1
    secret: bytes
    peers: Peers
    section: PeerSection

    def __repr__(self) -> str:
        """Hide the secret."""
        return f"PeerJob({worker_name(self.number)})"

    @property
    def end_s(self) -> float:
        """Time limit in seconds for ending; it is long, because only this worker has its model."""
        return longest_end_s(self.section.lease_s)

    def make_peer(self, trainer: Trainer, folder: Path) -> PeerRuntime:
        """Create the worker's peer without starting it; `folder` stores its model for a restart."""
        own = self.peers.of(worker_name(self.number))
        assert own is not None
        return PeerRuntime(
            PeerMember(own, KeyPair.of(self.secret), self.peers, self.incarnation),
            self.section,
            PeerModel(trainer, np.load(folder / INITIAL_FILE)),
            model_file=model_file(folder, self.number),
            meets=self.incarnation == 1,
        )


def model_file(folder: Path, number: int) -> Path:
    """Return the path of a worker's model."""
    return folder / worker_name(number) / PEER_MODEL_FILE


def diverged_file(folder: Path, number: int) -> Path:
    """Return the path of a file that exists if the worker's training has diverged."""
    return folder / worker_name(number) / "diverged"


def note_end(peer: PeerRuntime, folder: Path, number: int) -> None:
    """Record whether a worker's training has diverged, since its saved model does not show this."""
    if peer.diverged:
        mark = diverged_file(folder, number)
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
