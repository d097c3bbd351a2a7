"""What a worker of `train` needs to know to be a peer of the others."""

from pathlib import Path

import msgspec
import numpy as np

from edgeasync.durable.keys import KeyPair
from edgeasync.durable.peers_file import Peers
from edgeasync.graphs.model_file import load_kept
from edgeasync.runtime.agent_settings import PeersSection
from edgeasync.runtime.peer import PEER_MODEL_FILE, Peer, longest_end_s
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
    section: PeersSection

    def __repr__(self) -> str:
        """Show nothing of the secret."""
        return f"PeerJob({worker_name(self.number)})"

    @property
    def end_s(self) -> float:
        """How long it may take to end once it is to: nobody else has its model."""
        return longest_end_s(self.section.lease_s)

    def make_peer(self, trainer: Trainer, folder: Path) -> Peer:
        """Return the worker's peer, not running yet; in `folder` it keeps its model, to resume after a death."""
        own = self.peers.of(worker_name(self.number))
        assert own is not None
        kept = model_file(folder, self.number)
        parameters, steps = load_kept(kept, trainer.spec, np.load(folder / INITIAL_FILE))
        section = self.section
        return Peer(
            own,
            KeyPair.of(self.secret),
            self.peers,
            incarnation=self.incarnation,
            trainer=trainer,
            parameters=parameters,
            settings=section.core_settings(),
            meets=self.incarnation == 1,
            steps_max=section.steps_max,
            rounds_max=section.rounds_max,
            steps_total=steps,
            model_file=kept,
        )


def model_file(folder: Path, number: int) -> Path:
    """Return where a worker keeps its model."""
    return folder / worker_name(number) / PEER_MODEL_FILE


def diverged_file(folder: Path, number: int) -> Path:
    """Return the file that is there if a worker's training has diverged."""
    return folder / worker_name(number) / "diverged"


def note_end(peer: Peer, folder: Path, number: int) -> None:
    """Write down that a worker's training has diverged: its last model, if there is one, does not show it."""
    if peer.diverged:
        mark = diverged_file(folder, number)
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
