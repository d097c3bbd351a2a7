"""`train`: a hub in this process and its workers, from one call to a trained model."""

import asyncio
import concurrent.futures
import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from edgeasync.data.dataset import Dataset
from edgeasync.graphs.model_file import load_model
from edgeasync.host.at_exit import stop_at_exit
from edgeasync.host.event_loop import check_threads
from edgeasync.losses import LossSetting
from edgeasync.policies.policy import Policy, is_recordable
from edgeasync.runtime.hub import HubRuntime
from edgeasync.sdk.blocking import blocking
from edgeasync.sdk.callbacks import Callback, Callbacks
from edgeasync.sdk.models import GraphArguments, local_training
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
from edgeasync.sdk.shares import check_epochs, split
from edgeasync.sdk.stop import Stop
from edgeasync.sdk.workers.base import Workers, examples_of, run_together
from edgeasync.sdk.workers.engines import Engine, make_workers
from edgeasync.temporary import TemporaryFolder

LOG = logging.getLogger("edgeasync.train")

DEFAULT_EPOCHS = 10.0
"""How long `train` trains if nothing is said."""


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
    optimizer: object = None,
    batch_size: int | None = None,
    accumulation_steps: int | None = None,
    micro_batch_size: int | str | None = None,
    keep_optimizer_state: bool | None = None,
    metrics: object = (),
    loss: LossSetting = "cross_entropy",
    output: str | None = None,
    train: str | Sequence[str] = (),
    freeze: str | Sequence[str] = (),
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    trust_code: bool = False,
    engine: Engine = "tasks",
    ray_address: str | None = None,
    topology: Literal["star", "ring", "all_to_all"] = "star",
) -> Run:
    """Train a model with several workers, and return the run. The hub is in this process.

    `train` blocks, in a notebook, too; an interrupt is raised once the newest version is in the run's folder.
    `train_async` runs on the loop of its caller; a cancel leaves that version there, too. So does a program that
    ends while another thread trains: it does not wait for `until`.

    - `model`: layers of `edgeasync.nn`, the path of an ONNX file, an `onnx.ModelProto`, a `SoftmaxModel` or
      `MlpModel`, or a model of your own: an object with `parameters`, a dict of float arrays, and a method
      `gradient(arrays, x, y)`, which returns a batch's mean loss and a dict of gradients.
    - `data`: a `Dataset`, a tuple `(x, y)` of arrays, or the path of a file of them, which is split evenly at
      random. A list has the data of each worker. With a list of trainers of your own, the `model` is a dict of
      named arrays to begin with.
    - `workers`: how many; by default 4, or one for each entry of a list.
    - `run`: the folder of the run, which continues if it already holds one. Without a folder the run lives as
      long as the object that is returned.
    - `until`: when training ends; by default after 10 passes over the data.
    - `evaluate`: held-out data, in any form that `data` may have but a list, or a function of the named arrays. It
      returns a loss, or a loss and an accuracy.
    - `callbacks`: functions, or objects with methods such as `on_update`; see `edgeasync.callbacks`.
    - `optimizer`: of the workers, such as `SGD(learning_rate=0.1)`, or a list of stages.
    - `batch_size`: of a local step; with `accumulation_steps` it is of this number of batches together. With
      `micro_batch_size` no more examples go through the model at once; `"auto"` chooses by speed and memory.
    - `keep_optimizer_state`: whether a worker's momentum and averages outlive its exchanges.
    - `metrics`: of `edgeasync.metrics`, objects or names; they come with `on_update`.
    - `loss`: for ONNX and layers, an object of `edgeasync.losses` or a name.
    - `output`, `train`, `freeze`: for ONNX and layers, as the flags of `edgeasync hub`: the tensor that the loss
      reads, and patterns of the parameters to train, `train=["head.*"]`, and not to train.
    - `seed`: of the first values, of the split, and of the order of examples.
    - `settings`: other sections of a hub's settings file, as tables: `{"codec": {"push": "int8"}}`.
    - `trust_code`: whether a folder that is continued may name plugins that `policy` does not have. They are
      imported, and run with your rights. Without it only installed ones are.
    - `engine`: where workers run. `"tasks"`: in threads of this process. `"processes"`: each in a process of its
      own (extra `processes`). `"ray"`: as actors on a Ray cluster (extra `ray`). In the last two a worker that
      dies comes back.
    - `ray_address`: the address of the cluster, as Ray's own `init` takes it; by default one that Ray is
      connected to already, or else a new one on this machine.

    - `topology`: `"star"`, with a hub; `"ring"` or `"all_to_all"`, without one. Then workers average their models
      among themselves every 10 local steps, or by `settings={"peers": {...}}`, keys of `[peer]`. The run's model
      is the mean of theirs, and there is no policy, callback or history. `until` takes `epochs`, `minutes` and
      `updates`: a worker's part in a round is one update. All three count from this call on, also in a run that
      continues; that of a hub is refused.

    When the updates of all workers are no longer finite, training ends, with the last good version; `Run.reason`
    then begins with "diverged".

    Raises `ConfigError`, `DataError`, `GraphError`, `ModelMismatchError` or `StorageError` if something does not
    fit, most of them before anything is trained. What a model, a trainer or `evaluate` raises comes out.

    >>> import numpy as np
    >>> from edgeasync import Stop, train
    >>> from edgeasync.training.numpy_models import SoftmaxModel
    >>> x = np.random.default_rng(0).normal(size=(200, 3))
    >>> run = train(SoftmaxModel(inputs=3, classes=2), (x, x[:, 0] > 0), until=Stop(updates=40))
    >>> run.updates >= 40
    True
    """
    check_threads()
    until = Stop(epochs=DEFAULT_EPOCHS) if until is None else until
    check_topology(topology)
    folder, remove = _folder(run)

    graph: GraphArguments = {"loss": loss, "output": output, "train": train, "freeze": freeze}
    training: dict[str, Any] = {
        "optimizer": optimizer,
        "batch_size": batch_size,
        "accumulation_steps": accumulation_steps,
        "micro_batch_size": micro_batch_size,
        "keep_optimizer_state": keep_optimizer_state,
        "metrics": metrics,
    }

    def begin_peers() -> PeerPlan:
        of_a_hub = {"policy": policy, "callbacks": callbacks, "ray_address": ray_address}
        check_hubless(topology, engine, of_a_hub)
        return plan_peers(
            model,
            split(data, workers, seed),
            peers_section(topology, settings, until),
            local_training(**training),
            graph=graph,
            until=until,
            run=folder,
            evaluate=evaluate,
            seed=seed,
            apart=engine == "processes",
        )

    def begin() -> tuple[HubPlan, Workers, int]:
        parts = split(data, workers, seed)
        check_epochs(until, parts)
        plan = plan_run(
            model,
            parts[0] if isinstance(parts[0], Dataset) else None,
            hub={"run": str(folder), "quiet": False, "durability": "journal" if remove is None else "checkpoint"},
            until=until,
            policy=policy,
            settings=settings,
            evaluate=evaluate,
            graph=graph,
            seed=seed,
            **training,
        )
        if remove is not None:  # nobody resumes it
            plan = replace(plan, recordable=is_recordable(plan.sections.policy))
        return plan, make_workers(engine, plan.prepared, parts, seed, ray_address), sum(map(examples_of, parts))

    async def with_peers() -> Run:
        return await train_with_peers(await asyncio.to_thread(begin_peers), folder)

    async def with_hub() -> Run:
        plan, crew, examples = await asyncio.to_thread(begin)
        async with Callbacks(callbacks) as told:
            listening = asyncio.Event()
            observer = Observer(until, examples, told.tell, listening.set, ends_diverged=True)
            told.on_stop = observer.finish_soon
            return await _serve(plan, crew, observer, listening, trust_code=trust_code)

    try:
        with _cancelled_at_exit():
            found = await (with_hub() if topology == "star" else with_peers())
    except BaseException:
        if remove is not None:
            remove()
        raise
    if remove is not None:
        weakref.finalize(found, remove)
    return found


train = blocking(train_async, "train")


@contextlib.contextmanager
def _cancelled_at_exit() -> Iterator[None]:
    """Cancel this task if the program ends meanwhile."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    assert task is not None

    def stop() -> None:
        LOG.warning("the program ends, and so does its training; wait for it, by Thread.join for example")
        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            loop.call_soon_threadsafe(task.cancel)

    stop_at_exit(done, stop, lambda: None)
    try:
        yield
    finally:
        done.set_result(None)


async def _serve(
    plan: HubPlan, workers: Workers, observer: Observer, listening: asyncio.Event, *, trust_code: bool
) -> Run:
    """Run the hub on this loop and its workers wherever they are; return the run."""
    reason = "interrupted"
    try:
        async with workers:
            hub = make_hub(plan, workers.bind, observer, workers.network, workers.keys, trust_code=trust_code)
            observer.watch(hub, asyncio.get_running_loop())

            async def serve() -> None:
                nonlocal reason
                found = await hub.run()
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


def _result(plan: HubPlan, hub: HubRuntime, observer: Observer, reason: str) -> Run:
    """Return the run, as the hub has left it."""
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
    """Return the run's folder and, if it is a temporary one, what removes it."""
    if run is not None:
        return as_path(run, "run"), None
    kept = TemporaryFolder("run-")
    return kept.path / "run", kept.remove
