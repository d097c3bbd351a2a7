"""A hub and its agents in one process: the real shells, over ZeroMQ's in-process transport."""

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import zmq

from edgeasync.core.hub.machine import HubCore
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.parameters import Vector
from edgeasync.policies.policy import Policy, PolicySet
from edgeasync.runtime.agent import Agent
from edgeasync.runtime.hub import Hub, OnReport
from edgeasync.runtime.model_file import MODEL_FILE, load_model
from edgeasync.training.trainer import Trainer


async def train_locally(
    trainers: Sequence[Trainer],
    initial: Vector,
    run: Path,
    *,
    updates: int,
    policy: PolicySet | None = None,
    settings: HubCoreSettings | None = None,
    on_report: OnReport | None = None,
) -> tuple[Vector, HubCore]:
    """Train with one agent per trainer until the hub has applied `updates`; return the model and the hub's core.

    The hub counts updates of one fold together, so there may be a few more than `updates`. If `settings` have a
    `stop`, training ends at whichever comes first. `initial` is a float32 vector: the arrays of the trainers'
    spec, flat and in the spec's order. If the folder `run` already holds a run, training resumes that run
    instead, and its updates count. If the task is cancelled, the newest model is in `run`. Nothing is evaluated:
    for that, give a `Hub` an `evaluator`.

    Raises the errors of a hub and of an agent. Raises `ConfigError` for a policy with a part of your own, and
    `ValueError` without trainers or for `updates` below 1.
    """
    if not trainers:
        raise ValueError("give at least one trainer")
    if updates < 1:
        raise ValueError(f"updates is {updates}; give 1 or more")
    spec = trainers[0].spec
    spec.check(initial)
    settings = settings or HubCoreSettings()
    stop = msgspec.structs.replace(settings.stop, updates=min(updates, settings.stop.updates or updates))
    address = f"inproc://{secrets.token_hex(8)}"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        hub = Hub(
            spec=spec,
            initial=lambda: np.array(initial),
            policy=policy or Policy(),
            bind=address,
            run=run,
            settings=msgspec.structs.replace(settings, stop=stop),
            on_report=on_report,
            context=context,
        )
        agents = [
            Agent(
                address,
                identity=DeviceIdentity(f"local-{number}", f"{number:032x}", 1),  # the same in every call on a run
                make_trainer=lambda _, trainer=trainer: trainer,  # type: ignore[misc]
                fingerprint=trainer.spec.fingerprint,
                context=context,
            )
            for number, trainer in enumerate(trainers, start=1)
        ]

        async def serve() -> None:
            await hub.run()
            for agent in agents:
                agent.request_stop()  # who had not joined by then would wait for ever

        async with asyncio.TaskGroup() as group:
            group.create_task(serve())
            for agent in agents:
                group.create_task(agent.run())
    except ExceptionGroup as errors:  # of the task group: what came first is what went wrong
        first = errors.exceptions[0]
        raise first from first.__cause__
    finally:
        context.destroy(linger=0)
    return load_model(run / MODEL_FILE, spec)[0], hub.core
