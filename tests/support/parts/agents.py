"""What an agent is made of, for tests that run one without a settings file."""

from typing import Any

from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.runtime.agent_settings import AgentSettings
from edgeasync.runtime.device import Device, OpenDevice
from edgeasync.runtime.workload import MakeTrainer, Workload

Parts = tuple[AgentSettings, OpenDevice, Workload]


def agent_parts(
    make_trainer: MakeTrainer,
    *,
    identity: DeviceIdentity | None = None,
    keys: DeviceKeys | None = None,
    examples: int = 0,
    **keys_of_file: Any,
) -> Parts:
    """Return the three arguments of an `AgentRuntime`; `keys_of_file` are keys of `[agent]` and `[limits]`."""
    settings = AgentSettings.of_keys(keys_of_file, where="agent_parts")
    who = identity or DeviceIdentity("pi", "0" * 32, 1)
    device = Device(who.device_id, keys=keys).open(who, settings.agent)
    return settings, device, Workload(make_trainer, examples=examples)
