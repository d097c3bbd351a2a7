"""`train`: runs a hub and its workers in one call, and returns the trained model."""

import asyncio
import concurrent.futures
import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Unpack

from msgspec.structs import replace

from edgeasync.data.dataset import Dataset
from edgeasync.graphs.model_file import load_model
from edgeasync.host.at_exit import stop_at_exit
from edgeasync.host.event_loop import check_threads
from edgeasync.policies.policy import Policy, is_recordable
from edgeasync.runtime.hub import HubRuntime
from edgeasync.sdk.blocking import blocking
from edgeasync.sdk.callbacks import Callback, Callbacks
from edgeasync.sdk.keywords import TrainingKeywords, check_keywords, of_graph, of_steps, show_keywords
from edgeasync.sdk.models import local_training
from edgeasync.sdk.observer import Observer
from edgeasync.sdk.peers import (
    PeerPlan,
    check_hubless,
    check_topology,
    peers_section,
    plan_peers,
    train_with_peers,
)
from edgeasync.sdk.plan import HubPlan, as_path, make_hub, plan_run
from edgeasync.sdk.run import Run
from edgeasync.sdk.shares import Share, check_epochs, split
from edgeasync.sdk.stop import Stop
from edgeasync.sdk.workers.base import Workers, examples_of, run_together
from edgeasync.sdk.workers.engines import Engine, make_workers
from edgeasync.temporary import TemporaryFolder
from edgeasync.web.beside import run_with_page

LOG = logging.getLogger("edgeasync.train")

DEFAULT_EPOCHS = 10.0
"""Number of passes over the data if `until` is not set."""


@show_keywords
async def train_async(
    model: object,
    data: object,
    *,
    workers: int | None = None,
    run: str | Path | None = None,
    until: Stop | None = None,
    policy: Policy | None = None,
    evaluate: object = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    trust_code: bool = False,
    engine: Engine = "tasks",
    ray_address: str | None = None,
    topology: Literal["star", "ring", "all_to_all"] = "star",
    **training: Unpack[TrainingKeywords],
) -> Run:
    """Train a model with several workers and return the run; see docs/train/python.md.

    `train` blocks the caller; `train_async` runs on the caller's event loop. After an interrupt, the
    folder `run` contains the newest version.

    - `model`: layers of `edgeasync.nn`, an ONNX file or your own model (docs/train/models.md).
    - `data`: a `Dataset`, a tuple `(x, y)` or a file path. The examples are split at random among
      the workers. Alternatively, pass a list with the data of each worker.
    - `until`: when to stop; by default, after 10 passes over the data.
    - `evaluate`: held-out data, or a function of the named arrays.
    - `settings`: other tables of a hub's settings file, such as `{"codec": {"push": "int8"}}`.
    - `engine`: where workers run: "tasks" (in this process), "processes" (on this machine), or
      "ray" (as actors on a Ray cluster).
    - `topology`: "ring" or "all_to_all" to train without a hub. Keys of `[peer]` are then set with
      `settings={"peer": {...}}`.
    - The keyword arguments after `topology` configure local training and the training graph.

    Raises an `EdgeAsyncError` for invalid arguments. Errors of a model, a trainer or `evaluate` are
    raised unchanged.

    >>> import numpy as np
    >>> from edgeasync import Stop, train
    >>> from edgeasync.training.numpy_models import SoftmaxModel
    >>> x = np.random.default_rng(0).normal(size=(200, 3))
    >>> run = train(SoftmaxModel(inputs=3, classes=2), (x, x[:, 0] > 0), until=Stop(updates=40))
    >>> run.updates >= 40
    True
    """
    check_keywords(training, train_async, "train")
    check_threads()
    check_topology(topology)
    if topology != "star":
        check_hubless(topology, engine, {"policy": policy, "callbacks": callbacks, "ray_address": ray_address})
    until = Stop(epochs=DEFAULT_EPOCHS) if until is None else until

    async def begin(folder: Path, *, kept: bool) -> Run:
        job = _Job(model, data, workers, folder, until, evaluate, seed, settings, training)
        if topology != "star":
            return await _train_with_peers(job, topology, apart=engine == "processes")
        return await _train_with_hub(job, policy, callbacks, _Place(engine, ray_address, trust_code), kept=kept)

    return await _in_folder(run, begin)


train = blocking(train_async, "train")


class _Place(NamedTuple):
    """Where workers run, and whether code named in the run's folder may be imported."""

    engine: Engine
    ray_address: str | None
    trust_code: bool


class _Job(NamedTuple):
    """The arguments of a call of `train`."""

    model: object
    data: object
    workers: int | None
    folder: Path
    until: Stop
    evaluate: object
    seed: int
    settings: Mapping[str, Any] | None
    training: TrainingKeywords

    def plan_peers(self, topology: str, *, apart: bool) -> PeerPlan:
        """Plan a run without a hub."""
        return plan_peers(
            self.model,
            split(self.data, self.workers, self.seed),
            peers_section(topology, self.settings, self.until),
            local_training(**of_steps(self.training)),
            graph=of_graph(self.training),
            until=self.until,
            run=self.folder,
            evaluate=self.evaluate,
            seed=self.seed,
            apart=apart,
        )

    def plan_run(self, parts: Sequence[Share], policy: Policy | None, *, kept: bool) -> HubPlan:
        """Plan a run; `kept` is false if the run's folder is temporary."""
        check_epochs(self.until, parts)
        plan = plan_run(
            self.model,
            parts[0] if isinstance(parts[0], Dataset) else None,
            hub={"run": str(self.folder), "quiet": False, "durability": "journal" if kept else "checkpoint"},
            until=self.until,
            policy=policy,
            evaluate=self.evaluate,
            training=self.training,
            seed=self.seed,
            settings=self.settings,
        )
        # A run in a temporary folder is never resumed, so its policy need not be recordable.
        return plan if kept else replace(plan, recordable=is_recordable(plan.sections.policy))


async def _train_with_peers(job: _Job, topology: str, *, apart: bool) -> Run:
    plan = await asyncio.to_thread(lambda: job.plan_peers(topology, apart=apart))
    return await train_with_peers(plan, job.folder)


async def _train_with_hub(
    job: _Job, policy: Policy | None, callbacks: Sequence[Callback], place: _Place, *, kept: bool
) -> Run:
    def begin() -> tuple[HubPlan, Workers, int]:
        parts = split(job.data, job.workers, job.seed)
        plan = job.plan_run(parts, policy, kept=kept)
        crew = make_workers(place.engine, plan.prepared, parts, job.seed, place.ray_address)
        return plan, crew, sum(map(examples_of, parts))

    plan, crew, examples = await asyncio.to_thread(begin)
    async with Callbacks(callbacks) as told:
        listening = asyncio.Event()
        observer = Observer(job.until, examples, told.tell, listening.set, ends_diverged=True)
        told.on_stop = observer.finish_soon
        return await _serve(plan, crew, observer, listening, trust_code=place.trust_code)


class _Begin(Protocol):
    async def __call__(self, folder: Path, *, kept: bool) -> Run:
        """Train in a folder. Unless `kept` is set, the folder is deleted with the returned `Run`."""
        ...


async def _in_folder(run: str | Path | None, begin: _Begin) -> Run:
    """Train in the run's folder, or in a temporary one that is deleted with the run."""
    folder, remove = _folder(run)
    try:
        with _cancelled_at_exit():
            found = await begin(folder, kept=remove is None)
    except BaseException:
        if remove is not None:
            remove()
        raise
    if remove is not None:
        weakref.finalize(found, remove)
    return found


@contextlib.contextmanager
def _cancelled_at_exit() -> Iterator[None]:
    """Cancel this task if the program exits before the end of the block."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    assert task is not None

    def stop() -> None:
        LOG.warning("the program exits, which ends training; wait for it, for example with Thread.join")
        with contextlib.suppress(RuntimeError):  # the loop has just closed
            loop.call_soon_threadsafe(task.cancel)

    stop_at_exit(done, stop, lambda: None)
    try:
        yield
    finally:
        done.set_result(None)


async def _serve(
    plan: HubPlan, workers: Workers, observer: Observer, listening: asyncio.Event, *, trust_code: bool
) -> Run:
    """Run the hub on this loop, and run its workers; return the run."""
    reason = "interrupted"
    try:
        async with workers:
            hub = make_hub(plan, workers.bind, observer, workers.network, workers.keys, trust_code=trust_code)
            observer.watch(hub, asyncio.get_running_loop())

            async def serve() -> None:
                nonlocal reason
                found = await run_with_page(hub, plan.sections, _log_page)
                reason = observer.reason or found
                workers.stop()
                listening.set()

            async def work() -> None:
                await listening.wait()
                await workers.run(hub)

            await run_together([serve(), work()])
    finally:
        observer.end(reason)
    return await asyncio.to_thread(_result, plan, hub, observer, reason)


def _log_page(urls: Mapping[str, str], _: object) -> None:
    LOG.info("the hub serves %s", ", ".join(urls.values()))


def _result(plan: HubPlan, hub: HubRuntime, observer: Observer, reason: str) -> Run:
    """Build the run from the hub's final state."""
    spec, core = plan.prepared.spec, hub.core
    vector, version = load_model(hub.model_file, spec)
    last = core.policy_engine.state.evaluations.last
    return Run(
        plan.folder,
        dict(spec.views(vector)),
        version,
        restore=plan.prepared.restore,
        loss=None if last is None else last.loss,
        accuracy=None if last is None else last.accuracy,
        reason=reason,
        updates=core.updates_applied,
        devices=core.status(observer.now_s)["devices"],
        events=observer.noted,
    )


def _folder(run: str | Path | None) -> tuple[Path, Callable[[], None] | None]:
    """Return the run's folder and, for a temporary one, a function that deletes it."""
    if run is not None:
        return as_path(run, "run"), None
    kept = TemporaryFolder("run-")
    return kept.path / "run", kept.remove
