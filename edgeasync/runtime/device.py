"""A device as its settings describe it: who it is, where its state lies, and the agent that is made of it."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from edgeasync.config import expanded
from edgeasync.core.engine.device_engine import ObserveDevice
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
from edgeasync.host.sensing import make_sense
from edgeasync.net.network import ZmqNetwork
from edgeasync.parameters import Parameter
from edgeasync.protocol.messages import Frozen, Welcome
from edgeasync.runtime.agent import AgentRuntime, OnReport
from edgeasync.runtime.agent_settings import AgentSection, ThrottleSection
from edgeasync.runtime.training_thread import MakeInitial, MakeTrainer
from edgeasync.training.local_parameters import LocalParameters
from edgeasync.training.plan import CodeModel, LocalTraining, ReceivedGraph, TrainingPlan, read_plan
from edgeasync.training.trainer import Trainer

if TYPE_CHECKING:
    from edgeasync.durable.local_file import LocalFile
    from edgeasync.durable.spool_file import SpoolFile


class Device(NamedTuple):
    """Who a device is, where its state lies, and its keys if it has some; without a folder it keeps nothing."""

    device_id: str
    state: Path | None
    keys: DeviceKeys | None


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


def make_agent(
    section: AgentSection,
    device: Device,
    identity: DeviceIdentity,
    make_trainer: MakeTrainer,
    *,
    examples: int,
    fingerprint: str | None,
    parameters: Sequence[Parameter] = (),
    frozen: Frozen | None = None,
    on_report: OnReport,
    observe: ObserveDevice | None = None,
    initial: MakeInitial | None = None,
    trains_at_rest: bool = False,
    throttle: ThrottleSection | None = None,
    root: Path = Path("/"),
    network: ZmqNetwork | None = None,
) -> AgentRuntime:
    """Return the agent of a device, not running yet; raises what `AgentRuntime` raises.

    With `throttle` it keeps to limits, by what the sensors below `root` tell.
    """
    state = device.state
    return AgentRuntime(
        section.hubs,
        identity=identity,
        make_trainer=make_trainer,
        initial=initial,
        examples=examples,
        fingerprint=fingerprint,
        parameters=parameters,
        frozen=frozen,
        graph_bytes_max=section.graph_bytes_max,
        parameters_max=section.parameters_max,
        graphs=None if state is None else GraphCache(state / "graphs"),
        step_s_min=section.step_s_min,
        local_steps_max=section.local_steps_max or 0,
        delay_steps=section.delay_steps,
        bandwidth_bytes_per_s_max=section.bandwidth_bytes_per_s_max,
        link_share=section.link_share,
        bytes_per_day_max=section.bytes_per_day_max,
        quota_file=None if state is None else QuotaFile(state),
        spool=None if state is None else _open_spool(section, state, identity),
        alone_steps_max=section.alone_steps_max,
        local=LocalParameters(section.local, None if state is None else partial(_open_local, state, identity)),
        trains_at_rest=trains_at_rest,
        limits=None if throttle is None else throttle.limits,
        sense=None if throttle is None else make_sense(root),
        insecure=section.insecure,
        keys=device.keys,
        enrol=section.enrol,
        knocking=section.hub_key is not None,
        on_report=on_report,
        observe=observe,
        network=network,
    )


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


def _open_spool(section: AgentSection, state: Path, identity: DeviceIdentity) -> "SpoolFile | None":
    if section.spool == "identity":
        return None
    from edgeasync.durable.spool_file import SpoolFile  # noqa: PLC0415 - only who keeps a spool pays for it

    return SpoolFile(state, identity.state_id)


def _open_local(state: Path, identity: DeviceIdentity) -> "LocalFile":
    from edgeasync.durable.local_file import LocalFile  # noqa: PLC0415 - only who has such parameters pays for it

    return LocalFile(state, identity.state_id)


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
