"""A device as its settings describe it: who it is, where its state lies, and what it keeps there."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from edgeasync.config import expanded
from edgeasync.core.engine.sender import Sender
from edgeasync.data.dataset import Dataset
from edgeasync.durable.allow_list import read_key
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.identity import DeviceIdentity, default_device_id
from edgeasync.durable.keys import Token
from edgeasync.durable.quota_file import QuotaFile
from edgeasync.errors import ConfigError
from edgeasync.graphs.graph_cache import GraphCache
from edgeasync.graphs.user_code import make_trainer
from edgeasync.net.credentials import Credentials, find_credentials
from edgeasync.protocol.messages import Welcome
from edgeasync.runtime.agent_settings import AgentSection
from edgeasync.training.local_parameters import LocalParameters
from edgeasync.training.plan import CodeModel, LocalTraining, ReceivedGraph, TrainingPlan, read_plan
from edgeasync.training.trainer import Trainer

if TYPE_CHECKING:
    from edgeasync.durable.local_file import LocalFile
    from edgeasync.durable.spool_file import SpoolFile


class OpenDevice(NamedTuple):
    """A device in one start: who it is, by which keys it speaks to which hub, and where it keeps its state.

    Without a state folder it keeps nothing.
    """

    identity: DeviceIdentity
    credentials: Credentials
    state: Path | None = None

    def graph_cache(self) -> GraphCache | None:
        """Return where it keeps training graphs, `None` without a state folder."""
        return None if self.state is None else GraphCache(self.state / "graphs")

    def quota_file(self) -> QuotaFile | None:
        """Return where it keeps the count of the day's bytes, `None` without a state folder."""
        return None if self.state is None else QuotaFile(self.state)

    def spool_file(self) -> "SpoolFile | None":
        """Return where it keeps what has no answer yet, `None` without a state folder."""
        if self.state is None:
            return None
        from edgeasync.durable.spool_file import SpoolFile  # noqa: PLC0415 - only who keeps a spool pays for it

        return SpoolFile(self.state, self.identity.state_id)

    def local_parameters(self, patterns: Sequence[str]) -> LocalParameters:
        """Return its own values of the arrays that match; without a state folder they do not outlive a restart."""
        return LocalParameters(patterns, None if self.state is None else partial(_open_local, self))


class Device(NamedTuple):
    """Who a device is, where its state lies, and its keys if it has some; without a folder it keeps nothing."""

    device_id: str
    state: Path | None = None
    keys: DeviceKeys | None = None

    def open(self, identity: DeviceIdentity, section: AgentSection) -> OpenDevice:
        """Return the device of one start, whose state folder is open; raises what `find_credentials` raises."""
        knocking = section.hub_key is not None
        credentials = find_credentials(
            section.hubs, self.keys, section.enrol, knocking=knocking, insecure=section.insecure
        )
        return OpenDevice(identity, credentials, self.state)


def find_device(section: AgentSection) -> Device:
    """Return who this device is; with keys, what its hub calls it. Raises `ConfigError` for another's name."""
    device_id = section.device_id or default_device_id()
    if section.state is None:
        for name, value in (("enrol", section.enrol), ("hub_key", section.hub_key)):
            if value is not None:
                raise ConfigError(f"{name} needs state: a folder for the device's own key")
        if section.spool == "full":
            raise ConfigError("spool = 'full' needs state: a folder for the updates that wait")
        return Device(device_id, None, None)
    state = expanded(section.state)
    keys = DeviceKeys(state)
    if section.hub_key is not None:
        _knock(keys, section, section.hub_key, device_id)
    if section.enrol is None and not keys.made:
        return Device(device_id, state, None)
    name = keys.hub().name if section.enrol is None else Token.read(section.enrol).name
    device_id = section.device_id or name
    if not Sender(name=name, role="device").speaks_for(device_id):
        raise ConfigError(
            f"the name {device_id} (--device-id): this device's key speaks for {name}, and "
            f"for {name}/0, {name}/1 and so on"
        )
    return Device(device_id, state, keys)


def planned_trainer(
    section: AgentSection,
    welcome: Welcome,
    graph: bytes | None,
    dataset: Dataset | None,
    own: Callable[[LocalTraining], LocalTraining] = lambda local: local,
) -> Trainer:
    """Return the device's own trainer if it names one, else the one that the hub asks for.

    `own` changes what the device decides itself. Raises `ConfigError`, and whatever makes the trainer raises.
    """
    if section.trainer is not None:
        return make_trainer(section.trainer, welcome, dataset)
    assert dataset is not None  # only an own trainer does without
    received = None if graph is None else ReceivedGraph(graph, welcome.spec, section.cores_used, section.provider)
    plan = read_plan(welcome.settings) if welcome.settings else TrainingPlan(model=CodeModel())
    local = own(plan.local)
    if section.micro_batch_size is not None:
        local = replace(local, micro_batch_size=section.micro_batch_size)
    plan = replace(plan, local=local)
    return plan.make_trainer(dataset, section.seed, received, spec=welcome.spec)


def _open_local(device: OpenDevice) -> "LocalFile":
    from edgeasync.durable.local_file import LocalFile  # noqa: PLC0415 - only who has such parameters pays for it

    assert device.state is not None
    return LocalFile(device.state, device.identity.state_id)


def _knock(keys: DeviceKeys, section: AgentSection, hub_key: str, device_id: str) -> None:
    """Write down which hub this device wants to belong to; raises `ConfigError`."""
    if section.enrol is not None or not section.hubs:
        raise ConfigError("hub_key goes with hub, and without enrol: a token names the hub itself")
    try:
        hub = read_key(hub_key)
    except ValueError as error:
        raise ConfigError(f"hub_key: {error}") from error
    keys.own()
    keys.know(hub, section.hubs, device_id.partition("/")[0])
