"""`edgeasync agent`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edgeasync.cli.output import Printer
from edgeasync.cli.service import serve
from edgeasync.config import convert, read_toml, to_table
from edgeasync.core.device.effects import Report
from edgeasync.core.engine.sender import Sender
from edgeasync.data.files import load
from edgeasync.durable.allow_list import read_key
from edgeasync.durable.day_file import DayFile
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.identity import DeviceFolder, DeviceIdentity, default_device_id
from edgeasync.durable.keys import Token
from edgeasync.errors import ConfigError, DataError
from edgeasync.protocol.messages import Welcome
from edgeasync.runtime.agent import Agent
from edgeasync.runtime.agent_settings import AgentSection, AgentSettings
from edgeasync.runtime.graph_cache import GraphCache
from edgeasync.training.plan import ReceivedGraph, read_plan
from edgeasync.training.trainer import Trainer

if TYPE_CHECKING:
    from edgeasync.durable.spool_file import SpoolFile

PROGRESS_S = 10.0


def run_agent(config: Path | None, flags: dict[str, Any], printer: Printer) -> None:
    """Run an agent by a settings file, flags, or both; a flag wins over the file."""
    settings = AgentSettings() if config is None else read_toml(config, AgentSettings)
    section = convert(to_table(settings.agent) | flags, AgentSection, where="flags")
    who = _who(section)
    data = _needed(section, knows_hub=who.keys is not None)
    dataset = load(data)
    device_id, state = who.device_id, who.state
    folder = DeviceFolder(state)
    identity = folder.open(device_id)

    def on_report(report: Report) -> None:
        if report.event != "answered":
            printer.event(report.event, detail=_detail(report, agent))

    def make_trainer(welcome: Welcome) -> Trainer:
        graph = (
            None
            if agent.graph is None
            else ReceivedGraph(agent.graph, welcome.spec, section.threads, section.provider)
        )
        try:
            return read_plan(welcome.settings).make_trainer(dataset, section.seed, graph, spec=welcome.spec)
        except DataError as error:
            raise DataError(f"{data}: {error}") from error

    agent = Agent(
        section.hubs,
        identity=identity,
        make_trainer=make_trainer,
        examples=len(dataset),
        fingerprint=None if settings.model is None else settings.model.spec.fingerprint,
        graph_bytes_max=section.graph_bytes_max,
        parameters_max=section.parameters_max,
        graphs=GraphCache(state / "graphs"),
        step_s_min=section.step_s_min,
        local_steps_max=section.local_steps_max or 0,
        bandwidth_bytes_per_s_max=section.bandwidth_bytes_per_s_max,
        bytes_per_day_max=section.bytes_per_day_max,
        day_file=DayFile(state),
        spool=_open_spool(section, state, identity),
        alone_steps_max=section.alone_steps_max,
        insecure=section.insecure,
        keys=who.keys,
        enrol=section.enrol,
        knocking=section.hub_key is not None,
        on_report=on_report,
    )
    told = 0

    def on_progress() -> None:
        nonlocal told
        if agent.steps_total == told:
            return
        told = agent.steps_total
        if printer.json:
            printer.event(
                "progress",
                steps=agent.steps_total,
                updates_answered=agent.updates_answered,
                round_trip_s=agent.round_trip_s,
                day_left_bytes=agent.day_left_bytes,
            )
        else:
            printer.event("progress", detail=_work_done(agent))

    for remark in folder.remarks:
        printer.event("warning", detail=remark)
    printer.event("started", device=device_id, detail=f"{len(dataset)} examples, start {identity.incarnation}")
    try:
        reason = serve(agent, PROGRESS_S, on_progress, state)
    finally:
        folder.close()
    if printer.json:
        printer.event(
            "stopped",
            reason=reason,
            steps=agent.steps_total,
            updates_answered=agent.updates_answered,
            day_left_bytes=agent.day_left_bytes,
        )
    else:
        printer.event("stopped", detail=f"{reason}: {_work_done(agent)}")


def _detail(report: Report, agent: Agent) -> str:
    """Return what to say of an event: with the hub's address where that is the news."""
    of_several = len(agent.addresses) > 1 and report.event in ("joined", "disconnected")
    return f"{agent.address}: {report.detail}" if report.event == "waiting" or of_several else report.detail


def _work_done(agent: Agent) -> str:
    work = f"{agent.steps_total} local steps, {agent.updates_answered} updates answered"
    return work if agent.day_left_bytes is None else f"{work}, {agent.day_left_bytes} bytes left of the day"


def _open_spool(section: AgentSection, state: Path, identity: DeviceIdentity) -> "SpoolFile | None":
    if section.spool == "identity":
        return None
    from edgeasync.durable.spool_file import SpoolFile  # noqa: PLC0415 - only who keeps a spool pays for it

    return SpoolFile(state, identity.state_id)


class _Who(NamedTuple):
    """Who this device is, where its state lies, and its keys if it has some."""

    device_id: str
    state: Path
    keys: DeviceKeys | None


def _who(section: AgentSection) -> _Who:
    """Return who this device is; with keys, what its hub calls it. Raises `ConfigError` for another's name."""
    device_id = section.device_id or default_device_id()
    state = Path(section.state or f"~/.local/state/edgeasync/{device_id}").expanduser()
    keys = DeviceKeys(state)
    if section.hub_key is not None:
        _knock(keys, section, section.hub_key, device_id)
    if section.enrol is None and not keys.made:
        return _Who(device_id, state, None)
    name = keys.hub().name if section.enrol is None else Token.read(section.enrol).name
    device_id = section.device_id or name
    if not Sender(name=name, role="device").speaks_for(device_id):
        raise ConfigError(
            f"--device-id {device_id}: this device's key speaks for {name}, and for {name}/0, {name}/1 and so on"
        )
    return _Who(device_id, state, keys)


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


def _needed(section: AgentSection, *, knows_hub: bool) -> Path:
    if section.hub is None and not knows_hub:
        raise ConfigError("which hub? give --hub tcp://HOST:PORT, or [agent] hub in a settings file")
    if section.data is None:
        raise ConfigError("which data? give --data FILE.npz or FILE.csv, or [agent] data in a settings file")
    return Path(section.data).expanduser()
