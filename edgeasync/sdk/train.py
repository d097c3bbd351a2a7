"""`train`: a hub and its workers in this process, from one call to a trained model."""

import asyncio
import contextlib
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from edgeasync.autodiff.settings import LossSetting
from edgeasync.core.hub.events import Evaluated
from edgeasync.data.dataset import Dataset
from edgeasync.data.partition import iid
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.errors import ConfigError, ModelMismatchError, StorageError
from edgeasync.policies.policy import Policy
from edgeasync.runtime.agent import Agent
from edgeasync.runtime.hub import Hub
from edgeasync.runtime.model_file import load_model
from edgeasync.sdk.blocking import blocking
from edgeasync.sdk.callbacks import Callback, Callbacks
from edgeasync.sdk.models import Prepared, as_dataset
from edgeasync.sdk.observer import Observer
from edgeasync.sdk.plan import Plan, as_path, make_hub, plan_run
from edgeasync.sdk.run import Run
from edgeasync.sdk.stop import Stop
from edgeasync.training.trainer import Trainer

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
    loss: LossSetting = "cross_entropy",
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> Run:
    """Train a model with several workers in this process, and return the run.

    `train` blocks, in a notebook, too; an interrupt is raised once the newest version is in the run's folder.
    `train_async` runs on the loop of its caller; a cancel leaves that version there, too.

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
    - `callbacks`: functions, or objects with methods such as `on_update`; see `edgeasync.sdk.events`.
    - `optimizer`: of the workers, such as `SGD(learning_rate=0.1)`, or a list of stages.
    - `batch_size`: of a local step.
    - `loss`: for ONNX and layers, by name or as a table (docs/settings.md).
    - `seed`: of the first values, of the split, and of the order of examples.
    - `settings`: other sections of a hub's settings file, as tables: `{"codec": {"push": "int8"}}`.

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
    until = Stop(epochs=DEFAULT_EPOCHS) if until is None else until
    folder, remove = _folder(run)

    def begin() -> tuple[Plan, list[Trainer], int]:
        parts = _parts(data, workers, seed)
        examples = sum(len(part) for part in parts if isinstance(part, Dataset))
        if not examples and isinstance(until, Stop) and until.epochs is not None:
            raise ConfigError(
                "until: trainers of your own do not say how much data they have; give Stop(updates=...)"
            )
        plan = plan_run(
            model,
            parts[0] if isinstance(parts[0], Dataset) else None,
            hub={"run": str(folder), "quiet": False, "durability": "journal" if remove is None else "checkpoint"},
            until=until,
            policy=policy,
            evaluate=evaluate,
            optimizer=optimizer,
            batch_size=batch_size,
            loss=loss,
            seed=seed,
            settings=settings,
        )
        return plan, _trainers(plan.prepared, parts, seed), examples

    try:
        plan, trainers, examples = await asyncio.to_thread(begin)
        async with Callbacks(callbacks) as told:
            found = await _run_tasks(plan, trainers, Observer(until, examples, told.tell))
    except BaseException:
        if remove is not None:
            remove()
        raise
    if remove is not None:
        weakref.finalize(found, remove)
    return found


train = blocking(train_async, "train")


async def _run_tasks(plan: Plan, trainers: Sequence[Trainer], observer: Observer) -> Run:
    """Run the hub and its workers as tasks of this loop, over ZeroMQ's in-process transport."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address, reason = f"inproc://{secrets.token_hex(8)}", "interrupted"
    try:
        hub = make_hub(plan, address, observer, context)
        observer.watch(hub, asyncio.get_running_loop())
        agents = [_make_agent(address, number, trainer, context) for number, trainer in enumerate(trainers, 1)]

        async def serve() -> None:
            nonlocal reason
            found = await hub.run()
            reason = observer.reason or found
            for agent in agents:
                agent.request_stop()  # who had not joined by then would wait for ever

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(serve())
                for agent in agents:
                    group.create_task(agent.run())
        except ExceptionGroup as errors:  # of the task group: what came first is what went wrong
            first = errors.exceptions[0]
            raise first from first.__cause__
    finally:
        context.destroy(linger=0)
        observer.end(reason)
    return await asyncio.to_thread(_result, plan, hub, observer, reason)


def _make_agent(address: str, number: int, trainer: Trainer, context: "zmq.Context[zmq.Socket[bytes]]") -> Agent:
    return Agent(
        address,
        identity=DeviceIdentity(f"worker-{number}", f"{number:032x}", 1),  # the same in every call on a run
        make_trainer=lambda _: trainer,
        fingerprint=trainer.spec.fingerprint,
        context=context,
    )


def _result(plan: Plan, hub: Hub, observer: Observer, reason: str) -> Run:
    """Return the run, with its last version evaluated."""
    spec, core = plan.prepared.spec, hub.core
    vector, version = load_model(hub.model_file, spec)
    last = core.policy_engine.state.evaluations.last if plan.evaluator is None else plan.evaluator(vector)
    if plan.evaluator is not None and last is not None:
        with contextlib.suppress(StorageError):  # of another hub that was started in this folder meanwhile
            hub.add_evaluation(Evaluated(version, last.loss, last.accuracy))
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
    kept = tempfile.mkdtemp(prefix="edgeasync-run-")
    return Path(kept) / "run", partial(shutil.rmtree, kept, ignore_errors=True)


def _parts(data: object, workers: int | None, seed: int) -> list[Dataset | Trainer]:
    """Return the data of each worker, or its trainer; raises `ConfigError` or `DataError`."""
    if workers is not None and not (isinstance(workers, int) and workers >= 1):
        raise ConfigError(f"workers is {workers!r}; give 1 or more")
    if not isinstance(data, list):
        return list(iid(as_dataset(data, "the data"), 4 if workers is None else workers, seed))
    if not data:
        raise ConfigError("the list of data is empty: give the data of at least one worker")
    if workers not in (None, len(data)):
        raise ConfigError(f"workers is {workers}, but there are data of {len(data)}; leave out workers")
    return [
        part if _is_trainer(part) else as_dataset(part, f"the data of worker {number}")
        for number, part in enumerate(data, 1)
    ]


def _trainers(prepared: Prepared, parts: Sequence[Dataset | Trainer], seed: int) -> list[Trainer]:
    """Return each worker's trainer; raises `ModelMismatchError` for one of another model."""
    trainers = [
        prepared.make_trainer(part, seed + number) if isinstance(part, Dataset) else part
        for number, part in enumerate(parts)
    ]
    for number, trainer in enumerate(trainers, 1):
        if trainer.spec != prepared.spec:
            raise ModelMismatchError(
                f"trainer {number} has other arrays than the model; give it the model's names and shapes"
            )
    return trainers


def _is_trainer(part: object) -> bool:
    return all(hasattr(part, name) for name in ("spec", "begin", "step"))
