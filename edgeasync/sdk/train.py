"""`train`: a hub and its workers in this process, from one call to a trained model."""

import asyncio
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from msgspec.structs import replace

from edgeasync.autodiff.settings import LossSetting
from edgeasync.config import convert, to_table
from edgeasync.data.dataset import Dataset
from edgeasync.data.partition import iid
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.errors import ConfigError, ModelMismatchError
from edgeasync.policies.policy import Policy
from edgeasync.runtime.agent import Agent
from edgeasync.runtime.hub import Hub
from edgeasync.runtime.hub_settings import HubSettings, RunSettings
from edgeasync.runtime.model_file import load_model
from edgeasync.sdk.blocking import blocking
from edgeasync.sdk.callbacks import Callback, Callbacks
from edgeasync.sdk.events import End
from edgeasync.sdk.models import Prepared, as_dataset, evaluator_of, local_training, prepare
from edgeasync.sdk.observer import Observer
from edgeasync.sdk.run import Run
from edgeasync.sdk.stop import Stop
from edgeasync.training.evaluation import Evaluator
from edgeasync.training.plan import TrainingPlan
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
    try:
        local = local_training(optimizer, batch_size)
        sections = _sections(settings, until, policy, folder, resumable=remove is None)
        parts = _parts(data, workers, seed)
        first = parts[0] if isinstance(parts[0], Dataset) else None
        prepared = prepare(model, first, local, loss=loss, run=folder, seed=seed)
        plan = _Plan(
            prepared=prepared,
            sections=replace(sections, local=local),
            folder=folder,
            trainers=_trainers(prepared, parts, seed),
            examples=sum(len(part) for part in parts if isinstance(part, Dataset)),
            evaluator=_evaluator(evaluate, until, prepared),
            until=until,
        )
        with Callbacks(callbacks) as told:
            found = await _run_tasks(plan, told)
    except BaseException:
        if remove is not None:
            remove()
        raise
    if remove is not None:
        weakref.finalize(found, remove)
    return found


train = blocking(train_async, "train")


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run needs to begin."""

    prepared: Prepared
    sections: RunSettings
    folder: Path
    trainers: list[Trainer]
    examples: int
    evaluator: Evaluator | None
    until: Stop


async def _run_tasks(plan: _Plan, told: Callbacks) -> Run:
    """Run the hub and its workers as tasks of this loop, over ZeroMQ's in-process transport."""
    loop, reason = asyncio.get_running_loop(), ""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def stop(why: str) -> None:
        nonlocal reason
        if not reason:
            reason = why
            loop.call_soon(hub.request_stop)  # not from inside the core's event that led to it

    observer = Observer(lambda: hub.core, plan.until, plan.examples, tell=told.tell, stop=stop)
    address = f"inproc://{secrets.token_hex(8)}"
    try:
        hub = _make_hub(plan, address, context, observer)
        agents = [
            _make_agent(address, number, trainer, context) for number, trainer in enumerate(plan.trainers, 1)
        ]

        async def serve() -> None:
            nonlocal reason
            found = await hub.run()
            reason = reason or found
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
        told.tell(End(time_s=observer.now_s, reason=reason or "interrupted"))
    return await asyncio.to_thread(_result, plan, hub, observer, reason)


def _make_hub(plan: _Plan, address: str, context: "zmq.Context[zmq.Socket[bytes]]", observer: Observer) -> Hub:
    prepared, sections = plan.prepared, plan.sections
    graph = prepared.graph
    record = None
    if prepared.described is not None and isinstance(sections.policy, Policy):
        fields = {name: getattr(sections, name) for name in sections.__struct_fields__}
        # Who resumes the run from the command line has no held-out data: an accuracy cannot end it there.
        fields["hub"] = replace(sections.hub, stop=replace(sections.hub.stop, accuracy=None))
        record = HubSettings(model=prepared.described, **fields).record()
    return Hub(
        spec=prepared.spec,
        initial=lambda: np.array(prepared.initial),
        policy=sections.policy,
        bind=address,
        run=plan.folder,
        settings=sections.core_settings(),
        training={}
        if prepared.shipped is None
        else to_table(TrainingPlan(model=prepared.shipped, local=sections.local)),
        graph=None if graph is None else graph.graph,
        forward=None if graph is None else graph.forward,
        evaluator=plan.evaluator,
        durability=sections.hub.durability,
        record=record,
        on_report=observer.on_report,
        observe=observer,
        context=context,
    )


def _make_agent(address: str, number: int, trainer: Trainer, context: "zmq.Context[zmq.Socket[bytes]]") -> Agent:
    return Agent(
        address,
        identity=DeviceIdentity(f"worker-{number}", f"{number:032x}", 1),  # the same in every call on a run
        make_trainer=lambda _: trainer,
        fingerprint=trainer.spec.fingerprint,
        context=context,
    )


def _result(plan: _Plan, hub: Hub, observer: Observer, reason: str) -> Run:
    """Return the run, with its last version evaluated."""
    spec, core = plan.prepared.spec, hub.core
    vector, version = load_model(hub.model_file, spec)
    last = core.policy_engine.state.evaluations.last if plan.evaluator is None else plan.evaluator(vector)
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
        return Path(run).expanduser(), None
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


def _sections(
    settings: Mapping[str, Any] | None, until: Stop, policy: Policy | None, folder: Path, *, resumable: bool
) -> RunSettings:
    """Return the sections of a hub's settings; raises `ConfigError` for one that says what an argument says."""
    table = dict(settings or {})
    for name in ("model", "local"):
        if name in table:
            raise ConfigError(
                f"settings has {name!r}: that is said by the arguments model, optimizer and batch_size"
            )
    hub = {"durability": "journal" if resumable else "checkpoint", "quiet": False} | dict(table.pop("hub", {}))
    for name, argument in (("stop", "until"), ("run", "run"), ("bind", "nothing: workers are in this process")):
        if name in hub:
            raise ConfigError(f"settings has hub.{name}: that is said by {argument}")
    sections = convert({**table, "hub": hub}, RunSettings, where="settings")
    section = replace(sections.hub, run=str(folder), stop=until.condition())
    return replace(sections, hub=section, policy=policy or sections.policy)


def _evaluator(evaluate: object, until: Stop, prepared: Prepared) -> Evaluator | None:
    if evaluate is None:
        if until.accuracy is not None:
            raise ConfigError("until.accuracy needs something to measure it on: give evaluate")
        return None
    if callable(evaluate):
        return evaluator_of(evaluate, prepared.spec)
    return prepared.make_evaluator(as_dataset(evaluate, "evaluate"))
