"""What an agent is made of, for tests that run one without a settings file."""

from typing import Any

from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.runtime.agent_settings import AgentSection, AgentSettings
from edgeasync.runtime.device import Device, OpenDevice
from edgeasync.runtime.workload import MakeTrainer, Workload

Parts = tuple[AgentSettings, OpenDevice, Workload]


def agent_parts(
    make_trainer: MakeTrainer,
    *,
    identity: DeviceIdentity | None = None,
    keys: DeviceKeys | None = None,
    examples: int = 0,
    **section: Any,
) -> Parts:
    """Return the three arguments of an `AgentRuntime`; `section` are keys of `[agent]`."""
    agent = AgentSection(**section)
    who = identity or DeviceIdentity("pi", "0" * 32, 1)
    device = Device(who.device_id, keys=keys).open(who, agent)
    return AgentSettings(agent=agent), device, Workload(make_trainer, examples=examples)
