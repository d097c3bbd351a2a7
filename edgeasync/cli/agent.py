"""`edgeasync agent`."""

from pathlib import Path

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from edgeasync.cli.device import hang_of, read_settings, state_folder
from edgeasync.cli.output import Printer
from edgeasync.cli.outputs import AgentProgress
from edgeasync.cli.serving import serve
from edgeasync.cli.settings_flags import Flags
from edgeasync.cli.under_systemd import find_notifier
from edgeasync.config import expanded
from edgeasync.core.device.effects import DeviceReport
from edgeasync.data.files import load
from edgeasync.durable.identity import DeviceFolder
from edgeasync.errors import ConfigError, DataError
from edgeasync.host.notify import AWAY, JOINED
from edgeasync.host.readings import Readings
from edgeasync.host.sensing import make_sense
from edgeasync.net.address import DEFAULT_ADDRESS
from edgeasync.plugins import find_code
from edgeasync.protocol.messages import Welcome
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.agent_settings import AgentSection, AgentSettings
from edgeasync.runtime.device import find_device, planned_trainer
from edgeasync.runtime.profiles import Profile, with_profile
from edgeasync.runtime.run_after_run import RunAfterRun
from edgeasync.runtime.workload import Workload
from edgeasync.training.trainer import Trainer

PROGRESS_S = 10.0


def run_agent(config: Path | None, said: Flags, printer: Printer) -> None:
    """Run an agent with the settings of a file, flags, or both. Flags override the file."""
    settings = read_settings(config, AgentSettings, said)
    fingerprint = None if settings.model is None else settings.model.spec.fingerprint
    _Command(settings, fingerprint, printer).run()


class _Command:
    """An agent that runs from the command line or under systemd."""

    def __init__(self, settings: AgentSettings, fingerprint: str | None, printer: Printer) -> None:
        section = settings.agent
        self._section, self._profile = with_profile(section, Readings())
        self._fingerprint, self._printer = fingerprint, printer
        self._notifier = find_notifier()
        self._state = state_folder(section)
        self._device = find_device(replace(section, state=str(self._state)))
        if section.hub is None and self._device.keys is None:
            self._section = replace(self._section, hub=DEFAULT_ADDRESS)
        self._settings = replace(settings, agent=self._section)
        self._data = _needed(section)
        self._dataset = None if self._data is None else load(self._data)
        self._folder = DeviceFolder(self._state)
        self._told = 0

    def run(self) -> None:
        """Run the agent until it ends."""
        try:
            self._runs = RunAfterRun(self._begin, self._tell_of_finished)
            self._notifier.ready()
            reason = serve(
                self._runs if self._section.when_finished == "wait" else self._runs.agent,
                PROGRESS_S,
                self._tell_of_progress,
                self._state,
                notifier=self._notifier,
                hangs=self._hangs,
            )
        finally:
            self._folder.close()
        agent = self._runs.agent
        self._printer.figures("stopped", _figures(agent, reason=reason), f"{reason}: {_work_done(agent)}")

    def _begin(self) -> AgentRuntime:
        """Open the state folder for the next start, and create the agent."""
        self._folder.close()
        identity = self._folder.open(self._device.device_id, Readings().mark())
        for remark in self._folder.remarks:
            self._printer.event("warning", detail=remark)
        examples = 0 if self._dataset is None else len(self._dataset)
        detail = _start(self._section, self._profile, examples, identity.incarnation)
        self._printer.event("started", device=self._device.device_id, detail=detail)
        return AgentRuntime(
            self._settings,
            self._device.open(identity, self._section),
            Workload(self._make_trainer, examples=examples, fingerprint=self._fingerprint),
            on_report=self._tell,
            sense=make_sense(),
        )

    def _make_trainer(self, welcome: Welcome) -> Trainer:
        try:
            return planned_trainer(self._section, welcome, self._runs.agent.graph, self._dataset)
        except DataError as error:
            raise DataError(f"{self._data}: {error}") from error

    def _tell(self, report: DeviceReport) -> None:
        if report.event != "answered":
            detail = _detail(report, self._runs.agent)
            self._tell_systemd(f"{report.event} {detail}")
            self._printer.event(report.event, detail=detail)

    def _tell_of_finished(self) -> None:
        detail = f"{_work_done(self._runs.agent)}; the device waits for the hub's next run"
        self._printer.event("finished", detail=detail)

    def _tell_of_progress(self) -> None:
        agent = self._runs.agent
        if agent.training.gate.steps_total == self._told:
            return
        self._told = agent.training.gate.steps_total
        self._tell_systemd(_work_done(agent))
        figures = _figures(agent, round_trip_s=agent.core.round_trip_s)
        self._printer.figures("progress", figures, _work_done(agent))

    def _tell_systemd(self, sentence: str) -> None:
        agent = self._runs.agent
        self._notifier.status(f"{JOINED if agent.joined else AWAY} {agent.address}: {sentence}")

    def _hangs(self) -> str:
        return hang_of(self._runs.agent.stalled_s(), self._section)


def _start(section: AgentSection, profile: Profile | None, examples: int, incarnation: int) -> str:
    own = "" if section.trainer is None else f", trainer {section.trainer}"
    board = "" if profile is None else f", profile {profile.name}: threads {section.cores_used}"
    return f"{examples} examples, start {incarnation}{own}{board}"


def _detail(report: DeviceReport, agent: AgentRuntime) -> str:
    """Return a report's text, with the hub's address if the address may have changed."""
    of_several = len(agent.addresses) > 1 and report.event in ("joined", "disconnected")
    return f"{agent.address}: {report.detail}" if report.event == "waiting" or of_several else report.detail


def _figures(
    agent: AgentRuntime, *, reason: str | UnsetType = UNSET, round_trip_s: float | UnsetType | None = UNSET
) -> AgentProgress:
    return AgentProgress(
        reason=reason,
        round_trip_s=round_trip_s,
        steps=agent.training.gate.steps_total,
        updates_answered=agent.core.work.updates_answered,
        day_left_bytes=agent.day_left_bytes,
    )


def _work_done(agent: AgentRuntime) -> str:
    work = f"{agent.training.gate.steps_total} local steps, {agent.core.work.updates_answered} updates answered"
    return work if agent.day_left_bytes is None else f"{work}, {agent.day_left_bytes} bytes left today"


def _needed(section: AgentSection) -> Path | None:
    """Return the device's data file, or None if a user-defined trainer needs no file."""
    if section.trainer is not None:
        find_code(section.trainer, f"trainer {section.trainer}")  # report a mistake before connecting to a hub
    if section.data is None and section.trainer is not None:
        return None
    if section.data is None:
        raise ConfigError("no data; pass --data FILE.npz or FILE.csv, or set data in [agent] of a settings file")
    return expanded(section.data)
