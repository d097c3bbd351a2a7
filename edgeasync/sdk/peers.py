"""`train(topology="ring")`: workers of this machine average their models among themselves, without a hub."""

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, cast, get_args

import numpy as np
from msgspec.structs import replace

from edgeasync.config import convert
from edgeasync.data.dataset import Dataset
from edgeasync.durable.keys import KeyPair
from edgeasync.durable.peers_file import PeerEntry, Peers
from edgeasync.errors import ConfigError
from edgeasync.parameters import Vector
from edgeasync.protocol.peer_messages import PEERS_MAX, Topology
from edgeasync.runtime.agent_settings import PeersSection
from edgeasync.runtime.model_file import MODEL_FILE, load_model, save_model
from edgeasync.runtime.peer import Peer
from edgeasync.sdk.models import Prepared
from edgeasync.sdk.run import Run
from edgeasync.sdk.shares import Share
from edgeasync.sdk.stop import Stop
from edgeasync.sdk.workers.base import (
    keep_alive,
    make_trainer,
    note_worker,
    run_together,
    worker_name,
)
from edgeasync.sdk.workers.files import make_folder, remove_folder, write_files
from edgeasync.sdk.workers.peer_job import INITIAL_FILE, PeerJob, model_file
from edgeasync.sdk.workers.processes import run_process
from edgeasync.training.evaluation import Evaluator
from edgeasync.training.plan import LocalTraining

ROUND_STEPS = 10
"""Local steps after which a round is due, if nothing is said."""

_SAID_HERE = ("topology", "peers", "bind", "steps_max", "epochs", "rounds_max", "out")


def check_topology(topology: object, peers: object = None) -> None:
    """Raise `ConfigError` unless this is one of the three, with a file of `peers` only where there are peers."""
    known = ("star", *get_args(Topology))
    if topology not in known:
        raise ConfigError(f"topology is {topology!r}; give one of {', '.join(map(repr, known))}")
    if topology == "star" and peers is not None:
        raise ConfigError("peers goes with topology='ring' or 'all_to_all'")


def peers_section(topology: str, settings: Mapping[str, Any] | None, until: Stop) -> PeersSection:
    """Return how workers average, by `settings={"peers": {...}}`; raises `ConfigError`.

    Without a hub training ends by `epochs`, `minutes` or `updates`: a worker's part in a round is one update.
    """
    table = dict(settings or {})
    own = table.pop("peers", {})
    if table or not isinstance(own, Mapping):
        raise ConfigError(
            "settings: without a hub there are settings of peers alone: {'peers': {'codec': 'float16'}}"
        )
    if said := sorted({*_SAID_HERE} & own.keys()):
        raise ConfigError(f"settings has peers.{said[0]}: that is said by an argument, or has no meaning here")
    if not isinstance(until, Stop):
        raise ConfigError(f"until is {type(until).__name__}; give Stop(epochs=10), for example")
    until.condition()  # raises for a value out of range
    if until.loss is not None or until.accuracy is not None or until.when is not None:
        raise ConfigError(
            "until: without a hub nobody sees the whole training; give Stop of epochs, minutes or updates"
        )
    usual = {} if "round_every_s" in own else {"round_steps": ROUND_STEPS}
    return convert({**usual, **own, "topology": topology}, PeersSection, where="settings.peers")


def _section_of(
    share: Share, section: PeersSection, until: Stop, local: LocalTraining, workers: int
) -> PeersSection:
    """Return the section with the end of one worker's training."""
    steps = rounds = None
    if until.epochs is not None:
        if not isinstance(share, Dataset):
            raise ConfigError(
                "until: trainers of your own do not say how much data they have; give Stop(updates=...)"
            )
        examples = min(local.batch_size * local.accumulation_steps, len(share))
        steps = math.ceil(until.epochs * len(share) / examples)
    if until.updates is not None:
        rounds = math.ceil(until.updates / workers)
    return replace(section, steps_max=steps, rounds_max=rounds)


class PeerWorkers:
    """The workers of one call. `async with` prepares their keys, and at its end leaves nothing of them behind."""

    def __init__(
        self,
        prepared: Prepared,
        shares: Sequence[Share],
        section: PeersSection,
        *,
        engine: str,
        until: Stop,
        local: LocalTraining,
        seed: int,
    ) -> None:
        if engine not in ("tasks", "processes"):
            raise ConfigError(
                f"engine is {engine!r}; without a hub workers are 'tasks' or 'processes' of this machine"
            )
        if not 2 <= len(shares) <= PEERS_MAX:
            raise ConfigError(
                f"without a hub there are 2 to {PEERS_MAX} workers, not {len(shares)}; change workers"
            )
        for number, share in enumerate(shares, 1):
            if not isinstance(share, Dataset) and share.spec != prepared.spec:
                raise ConfigError(
                    f"trainer {number} has other arrays than the model; give it the model's names and shapes"
                )
        self.prepared = prepared
        self._shares = shares
        self._apart = engine == "processes"
        self._sections = [_section_of(share, section, until, local, len(shares)) for share in shares]
        self._seed = seed
        self._minutes = until.minutes
        self._stopping = asyncio.Event()
        self._running: list[Peer] = []

    async def __aenter__(self) -> Self:
        """Make keys, and write what the workers need into a folder that only this user can open."""
        self.folder = await make_folder(self._write)
        self._pairs = [KeyPair.make() for _ in self._shares]
        self._peers = Peers(
            peer=tuple(
                [
                    PeerEntry(
                        name=worker_name(number),
                        address=f"ipc://{self.folder / str(number)}",
                        key=pair.public.hex(),
                    )
                    for number, pair in enumerate(self._pairs, 1)
                ]
            )
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Remove the folder."""
        await remove_folder(self.folder)

    def _write(self, folder: Path) -> None:
        np.save(folder / INITIAL_FILE, self.prepared.initial)
        if self._apart:
            write_files(folder, self.prepared.make_trainer, self._shares)

    async def run(self) -> None:
        """Train until all have ended; raise what one of them ended with."""
        numbers = range(1, len(self._shares) + 1)
        if self._apart:
            lives = [keep_alive(worker_name(number), partial(self._live_apart, number)) for number in numbers]
        else:
            lives = [self._live_here(number) for number in numbers]
        loop = asyncio.get_running_loop()
        timer = None if self._minutes is None else loop.call_later(60.0 * self._minutes, self.stop)
        try:
            await run_together(lives)
        finally:
            if timer is not None:
                timer.cancel()

    def stop(self) -> None:
        """Let all workers end; called on the loop."""
        self._stopping.set()
        for peer in self._running:
            peer.request_stop()

    @property
    def reason(self) -> str:
        """Why training ended."""
        return "until.minutes is reached" if self._stopping.is_set() else "all workers have reached until"

    def mean(self) -> tuple[Vector, int]:
        """Return the mean of the models that the workers ended with, and the most local steps of one of them.

        A worker that has taken no step has nothing to add, and may have left no file.
        """
        spec, numbers = self.prepared.spec, range(1, len(self._shares) + 1)
        files = [file for number in numbers if (file := model_file(self.folder, number)).exists()]
        found = [(vector, steps) for vector, steps in (load_model(file, spec) for file in files) if steps]
        found = found or [(self.prepared.initial, 0)]
        total = np.zeros(spec.length, np.float64)
        for vector, _ in found:
            total += vector
        return (total / len(found)).astype(np.float32), max(steps for _, steps in found)

    def _job(self, number: int, incarnation: int, threads: int) -> PeerJob:
        section = self._sections[number - 1]
        return PeerJob(
            number=number,
            incarnation=incarnation,
            # A worker that comes back draws other batches: it does not see the first ones again and again.
            seed=self._seed + number - 1 + len(self._shares) * (incarnation - 1),
            threads=threads,
            secret=self._pairs[number - 1].secret,
            peers=self._peers,
            topology=cast("Topology", section.topology),
            section=section,
        )

    async def _live_here(self, number: int) -> None:
        job = self._job(number, 1, 1)
        try:
            trainer = await asyncio.to_thread(
                make_trainer, self._shares[number - 1], self.prepared.make_trainer, job
            )
            if self._stopping.is_set():
                return
            peer = job.make_peer(trainer, self.folder)
            self._running.append(peer)
            await peer.run()
        except Exception as error:
            note_worker(error, worker_name(number))
            raise

    # -- in processes of their own ---------------------------------------------------------------------------

    async def _live_apart(self, number: int, deaths: int) -> None:
        threads = max(1, len(os.sched_getaffinity(0)) // len(self._shares))
        await run_process(self.folder, self._job(number, deaths + 1, threads), self._stopping)


async def train_with_peers(workers: PeerWorkers, folder: Path, evaluator: Evaluator | None) -> Run:
    """Train without a hub; return the run, whose model is the mean of what the workers ended with."""
    spec = workers.prepared.spec
    async with workers:
        await workers.run()
        vector, steps = await asyncio.to_thread(workers.mean)

    def result() -> Run:
        folder.mkdir(parents=True, exist_ok=True)
        save_model(folder / MODEL_FILE, spec, vector, lineage="", version=steps)
        last = None if evaluator is None else evaluator(vector)
        return Run(
            folder,
            dict(spec.views(vector)),
            steps,
            restore=workers.prepared.restore,
            loss=None if last is None else last.loss,
            accuracy=None if last is None else last.accuracy,
            reason=workers.reason,
        )

    return await asyncio.to_thread(result)
