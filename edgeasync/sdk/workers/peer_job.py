"""What a worker of `train` needs to know to be a peer of the others."""

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
    """Which worker is to train with which others. `secret` is the worker's own key, which nobody else has."""

    number: int
    incarnation: int
    seed: int
    threads: int = 1
    secret: bytes
    peers: Peers
    section: PeerSection

    def __repr__(self) -> str:
        """Show nothing of the secret."""
        return f"PeerJob({worker_name(self.number)})"

    @property
    def end_s(self) -> float:
        """How long it may take to end once it is to: nobody else has its model."""
        return longest_end_s(self.section.lease_s)

    def make_peer(self, trainer: Trainer, folder: Path) -> PeerRuntime:
        """Return the worker's peer, not running yet; in `folder` it keeps its model, to resume after a death."""
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
    """Return where a worker keeps its model."""
    return folder / worker_name(number) / PEER_MODEL_FILE


def diverged_file(folder: Path, number: int) -> Path:
    """Return the file that is there if a worker's training has diverged."""
    return folder / worker_name(number) / "diverged"


def note_end(peer: PeerRuntime, folder: Path, number: int) -> None:
    """Write down that a worker's training has diverged: its last model, if there is one, does not show it."""
    if peer.diverged:
        mark = diverged_file(folder, number)
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
