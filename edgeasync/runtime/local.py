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
    """Train with one agent a trainer until `updates` have been applied; return the model and the hub's core.

    Updates that are folded together are counted together, so there may be a few more. A `stop` in the settings
    counts too: training ends at what comes first. `initial` is a flat float32 vector of the trainers' spec,
    unused where `run` holds a run already: then training resumes where that was, and its updates count.
    Cancelled, it leaves the newest model in `run`. Nothing is evaluated: give a `Hub` an `evaluator` for that.
    Raises what a hub or an agent raises, `ConfigError` for a policy with a part of one's own, and `ValueError`
    without trainers or for `updates` below 1.
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
