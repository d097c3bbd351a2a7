"""`train(topology="ring")`: workers on this machine average their models without a hub."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, get_args

import msgspec
import numpy as np
from msgspec.structs import replace

from edgeasync.config import convert
from edgeasync.data.dataset import Dataset
from edgeasync.durable.files import FolderLock
from edgeasync.durable.keys import KeyPair
from edgeasync.durable.peers_file import PeerEntry, Peers
from edgeasync.durable.run_folder import MODEL_FILE
from edgeasync.errors import ConfigError, EdgeAsyncError, StorageError
from edgeasync.graphs.model_file import load_kept, load_model, save_model
from edgeasync.ops.runs import list_checkpoints
from edgeasync.parameters import Vector
from edgeasync.protocol.messages import PEERS_MAX
from edgeasync.protocol.peer_messages import Topology
from edgeasync.runtime.peer import PeerRuntime
from edgeasync.runtime.peer_settings import PeerSection
from edgeasync.sdk.keywords import GraphKeywords
from edgeasync.sdk.models import Prepared, graph_settings, prepare
from edgeasync.sdk.plan import make_evaluator
from edgeasync.sdk.run import Run
from edgeasync.sdk.shares import Share, check_epochs, check_same_model
from edgeasync.sdk.stop import Stop
from edgeasync.sdk.workers.base import (
    in_thread,
    keep_alive,
    make_trainer,
    note_worker,
    run_together,
    seed_of,
    worker_name,
)
from edgeasync.sdk.workers.files import make_folder, write_files
from edgeasync.sdk.workers.peer_job import INITIAL_FILE, PeerJob, diverged_file, model_file, note_end
from edgeasync.sdk.workers.processes import Forker, run_process, threads_of
from edgeasync.training.evaluation import Evaluator
from edgeasync.training.plan import LocalTraining

LOG = logging.getLogger("edgeasync.train")

ROUND_STEPS = 10
"""Default number of local steps between two rounds."""

_OF_WORKERS = {"codec", "frozen", "lease_s", "round_every_s", "round_steps"}
"""Keys of `[peer]` that `settings` may contain; other keys are arguments or do not apply."""


def check_topology(topology: object, peers: object = None) -> None:
    """Raise `ConfigError` if `topology` is unknown, or if `peers` is set with a hub."""
    known = ("star", *get_args(Topology))
    if topology not in known:
        raise ConfigError(f"topology is {topology!r}; choose one of {', '.join(map(repr, known))}")
    if topology == "star" and peers is not None:
        raise ConfigError("peers requires topology='ring' or 'all_to_all'")


def peers_section(topology: str, settings: Mapping[str, Any] | None, until: Stop) -> PeerSection:
    """Build the `[peer]` section of the workers; raises `ConfigError` for invalid arguments.

    Without a hub, only the conditions `epochs`, `minutes` and `updates` can end training. A round
    counts as one update for each worker that takes part.
    """
    table = dict(settings or {})
    own = table.pop("peer", {})
    if table or not isinstance(own, Mapping):
        raise ConfigError("settings: without a hub, only the table peer applies: {'peer': {'codec': 'float16'}}")
    if said := sorted({*PeerSection.__struct_fields__} & own.keys() - _OF_WORKERS):
        raise ConfigError(f"settings must not contain peer.{said[0]}: use an argument of train, or remove it")
    if not isinstance(until, Stop):
        raise ConfigError(f"until is {type(until).__name__}; pass a Stop such as Stop(epochs=10)")
    until.condition()  # raises for an invalid value
    if until.loss is not None or until.accuracy is not None or until.when is not None:
        raise ConfigError(
            "until: without a hub, only epochs, minutes and updates work; remove loss, accuracy and when from Stop"
        )
    usual = {} if "round_every_s" in own else {"round_steps": ROUND_STEPS}
    return convert({**usual, **own, "topology": topology}, PeerSection, where="settings.peer")


def _section_of(
    share: Share, section: PeerSection, until: Stop, local: LocalTraining, workers: int
) -> PeerSection:
    """Return the `[peer]` section of one worker, including the keys that end its training."""
    steps = rounds = None
    if until.epochs is not None:
        check_epochs(until, [share])
        assert isinstance(share, Dataset)
        steps = local.steps_of(until.epochs, len(share))
    if until.updates is not None:
        rounds = math.ceil(until.updates / workers)
    return replace(section, steps_max=steps, rounds_max=rounds)


class PeerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for training without a hub; `sections` has one entry per share of the data.

    If `apart` is true, the workers are processes, otherwise tasks of this process.
    """

    prepared: Prepared
    shares: Sequence[Share]
    sections: Sequence[PeerSection]
    apart: bool
    minutes: float | None
    seed: int
    evaluator: Evaluator | None


def check_hubless(topology: str, engine: str, of_a_hub: Mapping[str, object]) -> None:
    """Raise `ConfigError` if the engine or any argument requires a hub."""
    for name, given in of_a_hub.items():
        if given:
            raise ConfigError(f"{name} requires a hub, and topology={topology!r} has none; remove it")
    if engine not in ("tasks", "processes"):
        raise ConfigError(f"engine is {engine!r}; without a hub choose 'tasks' or 'processes'")


def plan_peers(
    model: object,
    shares: Sequence[Share],
    section: PeerSection,
    local: LocalTraining,
    *,
    graph: GraphKeywords,
    until: Stop,
    run: Path,
    evaluate: object,
    seed: int,
    apart: bool,
) -> PeerPlan:
    """Plan training without a hub; if `apart` is true, the workers are processes.

    Raises the same errors as `plan_run`.
    """
    if not 2 <= len(shares) <= PEERS_MAX:
        raise ConfigError(f"without a hub, the number of workers must be from 2 to {PEERS_MAX}, not {len(shares)}")
    example = shares[0] if isinstance(shares[0], Dataset) else None
    prepared = prepare(model, example, local, graph=graph_settings(**graph), run=run, seed=seed)
    local.check_model(prepared.spec, prepared.loss, in_chunks=prepared.in_chunks)
    check_same_model(shares, prepared.spec)
    return PeerPlan(
        prepared=prepared,
        shares=shares,
        sections=[_section_of(share, section, until, local, len(shares)) for share in shares],
        apart=apart,
        minutes=until.minutes,
        seed=seed,
        evaluator=make_evaluator(evaluate, None, prepared),
    )


class PeerWorkers:
    """The workers of one call of `train`; `async with` prepares them and cleans up at the end.

    All workers start from the values in `initial`.
    """

    def __init__(self, plan: PeerPlan, initial: Vector) -> None:
        self._plan = plan
        self._shares = plan.shares
        self._initial = initial
        self._stopping = asyncio.Event()
        self._running: list[PeerRuntime] = []
        self._diverged = False

    async def __aenter__(self) -> Self:
        """Create keys, and write the workers' files into a private folder."""
        self._temporary = await make_folder(self._write)
        self.folder = self._temporary.path
        self._forker = Forker(self.folder, threads_of(len(self._shares)))
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
        await self._forker.close()
        await in_thread(self._temporary.remove)

    def _write(self, folder: Path) -> None:
        np.save(folder / INITIAL_FILE, self._initial)
        if self._plan.apart:
            write_files(folder, self._plan.prepared.make_trainer, self._shares)

    async def run(self) -> None:
        """Train until all workers have ended; if any fails, raise the first error."""
        numbers = range(1, len(self._shares) + 1)
        if self._plan.apart:
            lives = [keep_alive(worker_name(number), partial(self._live_apart, number)) for number in numbers]
        else:
            lives = [self._live_here(number) for number in numbers]
        loop = asyncio.get_running_loop()
        minutes = self._plan.minutes
        timer = None if minutes is None else loop.call_later(60.0 * minutes, self.stop)
        try:
            await run_together(lives)
        finally:
            if timer is not None:
                timer.cancel()

    def stop(self) -> None:
        """Stop all workers; called on the loop."""
        self._stopping.set()
        for peer in self._running:
            peer.request_stop()

    @property
    def reason(self) -> str:
        """The reason why training ended."""
        if self._diverged:
            return "diverged: no worker has a model with finite values"
        return "until.minutes is reached" if self._stopping.is_set() else "all workers have reached until"

    def mean(self) -> tuple[Vector, int]:
        """Return the mean of the workers' final models, and the largest number of local steps.

        Workers that have taken no step or have diverged are ignored; their file may be missing.
        """
        spec, numbers = self._plan.prepared.spec, range(1, len(self._shares) + 1)
        files = [file for number in numbers if (file := model_file(self.folder, number)).exists()]
        found = [(vector, steps) for vector, steps in (load_model(file, spec) for file in files) if steps]
        self._diverged = not found and any(diverged_file(self.folder, number).exists() for number in numbers)
        found = found or [(self._initial, 0)]
        total = np.zeros(spec.length, np.float64)
        for vector, _ in found:
            total += vector
        return (total / len(found)).astype(np.float32), max(steps for _, steps in found)

    def _job(self, number: int, incarnation: int, threads: int) -> PeerJob:
        return PeerJob(
            number=number,
            incarnation=incarnation,
            seed=seed_of(self._plan.seed, number, len(self._shares), incarnation),
            threads=threads,
            secret=self._pairs[number - 1].secret,
            peers=self._peers,
            section=self._plan.sections[number - 1],
        )

    async def _live_here(self, number: int) -> None:
        job = self._job(number, 1, 1)
        try:
            trainer = await asyncio.to_thread(
                make_trainer, self._shares[number - 1], self._plan.prepared.make_trainer, job
            )
            if self._stopping.is_set():
                return
            peer = job.make_peer(trainer, self.folder)
            self._running.append(peer)
            await peer.run()
            await asyncio.to_thread(note_end, peer, self.folder, number)
        except Exception as error:
            note_worker(error, worker_name(number))
            raise

    # -- as separate processes -------------------------------------------------------------------------------

    async def _live_apart(self, number: int, deaths: int) -> None:
        job = self._job(number, deaths + 1, threads_of(len(self._shares)))
        await run_process(self._forker, job, self._stopping)


async def train_with_peers(plan: PeerPlan, folder: Path) -> Run:
    """Train without a hub; return a run with the mean of the workers' final models.

    Training starts from the model in the run's folder, if the folder contains one. At the end, the
    mean is written to the folder, even if training has failed.
    """
    spec, lock = plan.prepared.spec, FolderLock(folder, "run")
    try:
        initial, steps_before = await in_thread(partial(_open, lock, plan))
        async with PeerWorkers(plan, initial) as workers:

            def save() -> tuple[Vector, int]:
                vector, steps = workers.mean()
                try:
                    save_model(folder / MODEL_FILE, spec, vector, lineage="", version=steps_before + steps)
                except StorageError as error:
                    LOG.warning("%s; the trained model is in run.arrays only", error)
                return vector, steps_before + steps

            try:
                await workers.run()
            except BaseException:
                with contextlib.suppress(EdgeAsyncError):  # the original error matters more
                    await in_thread(save)
                raise
            vector, version = await in_thread(save)
        last = None if plan.evaluator is None else await asyncio.to_thread(plan.evaluator, vector)
        return Run(
            folder,
            dict(spec.views(vector)),
            version,
            restore=plan.prepared.restore,
            loss=None if last is None else last.loss,
            accuracy=None if last is None else last.accuracy,
            reason=workers.reason,
            events=(),
        )
    finally:
        lock.close()


def _open(lock: FolderLock, plan: PeerPlan) -> tuple[Vector, int]:
    """Lock the run's folder; return the model to start from, and the local steps taken so far.

    Raises `ConfigError` if the folder contains a run of a hub, `StorageError` if it cannot be read,
    and `ModelMismatchError` if it contains another model.
    """
    lock.take("a hub or another training has this folder; choose another run folder")
    for remark in lock.remarks:
        LOG.warning("%s", remark)
    if list_checkpoints(lock.path):
        raise ConfigError(
            f"{lock.path} contains a run with a hub, which a run without a hub cannot continue; choose another "
            "folder, or remove topology"
        )
    return load_kept(lock.path / MODEL_FILE, plan.prepared.spec, plan.prepared.initial)
