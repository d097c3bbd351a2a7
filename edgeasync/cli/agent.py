"""`edgeasync agent`."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from edgeasync.cli.output import Printer
from edgeasync.cli.serving import serve
from edgeasync.config import convert, read_toml, to_table
from edgeasync.core.device.effects import Report
from edgeasync.data.files import load
from edgeasync.durable.identity import DeviceFolder, default_device_id
from edgeasync.errors import ConfigError, DataError
from edgeasync.protocol.messages import Welcome
from edgeasync.runtime.agent import Agent
from edgeasync.runtime.agent_settings import AgentSection, AgentSettings
from edgeasync.runtime.device import Device, find_device, make_agent, planned_trainer
from edgeasync.runtime.own_code import find_code
from edgeasync.training.trainer import Trainer

PROGRESS_S = 10.0


def run_agent(config: Path | None, flags: dict[str, Any], printer: Printer) -> None:
    """Run an agent by a settings file, flags, or both; a flag wins over the file."""
    settings = AgentSettings() if config is None else read_toml(config, AgentSettings)
    section = convert(to_table(settings.agent) | flags, AgentSection, where="flags")
    device, state = _find(section)
    data = _needed(section, knows_hub=device.keys is not None)
    dataset = None if data is None else load(data)
    examples = 0 if dataset is None else len(dataset)
    folder = DeviceFolder(state)
    identity = folder.open(device.device_id)

    def on_report(report: Report) -> None:
        if report.event != "answered":
            printer.event(report.event, detail=_detail(report, agent))

    def make_trainer(welcome: Welcome) -> Trainer:
        try:
            return planned_trainer(section, welcome, agent.graph, dataset)
        except DataError as error:
            raise DataError(f"{data}: {error}") from error

    agent = make_agent(
        section,
        device,
        identity,
        make_trainer,
        examples=examples,
        fingerprint=None if settings.model is None else settings.model.spec.fingerprint,
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
    printer.event("started", device=device.device_id, detail=_start(section, examples, identity.incarnation))
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


def _start(section: AgentSection, examples: int, incarnation: int) -> str:
    own = "" if section.trainer is None else f", trainer {section.trainer}"
    return f"{examples} examples, start {incarnation}{own}"


def _detail(report: Report, agent: Agent) -> str:
    """Return what to say of an event: with the hub's address where that is the news."""
    of_several = len(agent.addresses) > 1 and report.event in ("joined", "disconnected")
    return f"{agent.address}: {report.detail}" if report.event == "waiting" or of_several else report.detail


def _work_done(agent: Agent) -> str:
    work = f"{agent.steps_total} local steps, {agent.updates_answered} updates answered"
    return work if agent.day_left_bytes is None else f"{work}, {agent.day_left_bytes} bytes left of the day"


def _find(section: AgentSection) -> tuple[Device, Path]:
    """Return who this device is, and its folder: one of its own under the user's, unless the settings name one."""
    state = section.state or f"~/.local/state/edgeasync/{section.device_id or default_device_id()}"
    return find_device(replace(section, state=state)), Path(state).expanduser()


def _needed(section: AgentSection, *, knows_hub: bool) -> Path | None:
    """Return the file of this device's data, if its own trainer does not do without; raises `ConfigError`."""
    if section.trainer is not None:
        find_code(section.trainer, f"trainer {section.trainer}")  # a mistake is told before a hub is looked for
    if section.hub is None and not knows_hub:
        raise ConfigError("which hub? give --hub tcp://HOST:PORT, or [agent] hub in a settings file")
    if section.data is None and section.trainer is not None:
        return None
    if section.data is None:
        raise ConfigError("which data? give --data FILE.npz or FILE.csv, or [agent] data in a settings file")
    return Path(section.data).expanduser()
