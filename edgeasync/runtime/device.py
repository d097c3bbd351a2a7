"""Find a device's identity, state folder and files from its settings."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from edgeasync.config import expanded
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.engine.sender import Sender
from edgeasync.data.dataset import Dataset
from edgeasync.durable.allow_list import read_key
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.identity import DeviceIdentity, default_device_id
from edgeasync.durable.keys import Token
from edgeasync.durable.quota_file import QuotaFile
from edgeasync.errors import ConfigError
from edgeasync.graphs.base_cache import BaseCache, Warn
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
    """A device that was opened for one start: its identity, its credentials and its state folder.

    Without a state folder, it stores only bases on disk.
    """

    identity: DeviceIdentity
    credentials: Credentials
    state: Path | None = None

    def graph_cache(self) -> GraphCache | None:
        """Return the cache of training graphs, or `None` without a state folder."""
        return None if self.state is None else GraphCache(self.state / "graphs")

    def base_cache(self, section: AgentSection, limits: DeviceLimits, warn: Warn) -> BaseCache:
        """Return the cache of bases, which this device shares with other agents of the user."""
        return BaseCache(Path(section.base_cache), int(limits.base_cache_bytes_max), warn)

    def quota_file(self) -> QuotaFile | None:
        """Return the file that stores today's byte count, or `None` without a state folder."""
        return None if self.state is None else QuotaFile(self.state)

    def spool_file(self) -> "SpoolFile | None":
        """Return the file that stores the unanswered update, or `None` without a state folder."""
        if self.state is None:
            return None
        from edgeasync.durable.spool_file import SpoolFile  # noqa: PLC0415 - imported only by devices with a spool

        return SpoolFile(self.state, self.identity.state_id)

    def local_parameters(self, patterns: Sequence[str]) -> LocalParameters:
        """Return the device's own values for the arrays that match `patterns`.

        Without a state folder, these values are lost at a restart.
        """
        return LocalParameters(patterns, None if self.state is None else partial(_open_local, self))


class Device(NamedTuple):
    """A device's id, its state folder, and its keys if it has any.

    Without a state folder, it stores only bases on disk.
    """

    device_id: str
    state: Path | None = None
    keys: DeviceKeys | None = None

    def open(self, identity: DeviceIdentity, section: AgentSection) -> OpenDevice:
        """Open the state folder, and return the device for one start.

        Raises the same errors as `find_credentials`.
        """
        knocking = section.hub_key is not None
        credentials = find_credentials(
            section.hubs, self.keys, section.enrol, knocking=knocking, insecure=section.insecure
        )
        return OpenDevice(identity, credentials, self.state)


def find_device(section: AgentSection) -> Device:
    """Return the device that the settings describe.

    If the device has keys, its name is the one under which the hub enrolled it. Raises
    `ConfigError` if `device_id` does not belong to the device's key.
    """
    device_id = section.device_id or default_device_id()
    if section.state is None:
        for name, value in (("enrol", section.enrol), ("hub_key", section.hub_key)):
            if value is not None:
                raise ConfigError(f"{name} needs a folder for the device's own key; set state")
        if section.spool == "full":
            raise ConfigError("spool = 'full' needs a folder for the unanswered update; set state")
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
            f"device_id {device_id!r} (--device-id) does not belong to this device's key; use {name}, or "
            f"{name}/0 to {name}/999 for several agents"
        )
    return Device(device_id, state, keys)


def planned_trainer(
    section: AgentSection,
    welcome: Welcome,
    graph: bytes | None,
    dataset: Dataset | None,
    own: Callable[[LocalTraining], LocalTraining] = lambda local: local,
) -> Trainer:
    """Return the trainer that the device's settings name, otherwise the one that the hub specifies.

    `own` may change the local part of the hub's training plan. Raises `ConfigError`, or an
    exception that the trainer's factory raises.
    """
    if section.trainer is not None:
        return make_trainer(section.trainer, welcome, dataset)
    assert dataset is not None  # only the device's own trainer may work without data
    received = None
    if graph is not None:
        base_folder = None if welcome.base is None else expanded(section.base_cache)
        received = ReceivedGraph(graph, welcome.spec, section.cores_used, section.provider, base_folder)
    plan = read_plan(welcome.settings) if welcome.settings else TrainingPlan(model=CodeModel())
    local = own(plan.local)
    if section.micro_batch_size is not None:
        local = replace(local, micro_batch_size=section.micro_batch_size)
    plan = replace(plan, local=local)
    return plan.make_trainer(dataset, section.seed, received, spec=welcome.spec)


def _open_local(device: OpenDevice) -> "LocalFile":
    from edgeasync.durable.local_file import LocalFile  # noqa: PLC0415 - imported only by devices with local parameters

    assert device.state is not None
    return LocalFile(device.state, device.identity.state_id)


def _knock(keys: DeviceKeys, section: AgentSection, hub_key: str, device_id: str) -> None:
    """Store the key and addresses of the hub that will be asked for admission. Raises `ConfigError`."""
    if section.enrol is not None or not section.hubs:
        raise ConfigError(
            "hub_key needs hub, and cannot be combined with enrol, whose token already contains the hub's key; "
            "set hub, and remove enrol"
        )
    try:
        hub = read_key(hub_key)
    except ValueError as error:
        raise ConfigError(f"hub_key: {error}") from error
    keys.own()
    keys.know(hub, section.hubs, device_id.partition("/")[0])
