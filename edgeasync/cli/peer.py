"""`edgeasync agent --topology ring|all_to_all`: an agent without a hub."""

from pathlib import Path

from msgspec.structs import replace

from edgeasync.cli.device import hang_of, state_folder
from edgeasync.cli.output import Printer
from edgeasync.cli.serving import serve
from edgeasync.cli.under_systemd import find_notifier
from edgeasync.config import expanded
from edgeasync.core.peer.effects import PeerReport
from edgeasync.data.files import load
from edgeasync.durable.identity import DeviceFolder, default_device_id
from edgeasync.errors import ConfigError, DataError
from edgeasync.graphs.graph_process import load_graph_apart
from edgeasync.host.notify import HUBLESS
from edgeasync.host.readings import Readings
from edgeasync.runtime.agent_settings import AgentSettings
from edgeasync.runtime.peer import Peer
from edgeasync.runtime.peer_device import check_trained_out, find_unkept, make_model, make_peer, write_trained
from edgeasync.runtime.profiles import with_profile

PROGRESS_S = 10.0

_FLAGS = {
    "bandwidth_bytes_per_s_max": "--bandwidth-max",
    "bytes_per_day_max": "--bytes-per-day-max",
    "spool": "--spool",
    "alone_steps_max": "--alone-steps-max",
    "hub": "--hub",
    "trainer": "--trainer",
    "local": "--local",
    "enrol": "--enrol",
    "hub_key": "--hub-key",
    "insecure": "--insecure",
    "when_finished": "--when-finished",
}
"""The flags of keys of `[agent]` that only an agent with a hub keeps to."""


def run_peer(settings: AgentSettings, printer: Printer) -> None:
    """Run an agent without a hub to its end."""
    _Command(settings, check_settings(settings), printer).run()


def check_settings(settings: AgentSettings) -> Path:
    """Return the file of the device's data; raises `ConfigError` for what only an agent with a hub takes."""
    if (key := find_unkept(settings.agent, settings.throttle)) is not None:
        said = f"{key} ({_FLAGS[key]})" if key in _FLAGS else key
        raise ConfigError(
            f"{said} is for an agent with a hub; leave it out, or leave out the topology (--topology)"
        )
    if settings.peers.peers is None:
        raise ConfigError("which peers? give --peers FILE, a TOML file that names them, or [peers] peers")
    if settings.agent.data is None:
        raise ConfigError("which data? give --data FILE.npz or FILE.csv, or [agent] data in a settings file")
    return expanded(settings.agent.data)


class _Command:
    """A peer that is run for a person or for systemd."""

    def __init__(self, settings: AgentSettings, data: Path, printer: Printer) -> None:
        self._section, self._profile = with_profile(settings.agent, Readings())
        self._settings = replace(settings, agent=self._section)
        self._printer = printer
        self._notifier = find_notifier()
        self._device_id = self._section.device_id or default_device_id()
        self._state = state_folder(self._section)
        self._dataset = load(data)
        try:
            self._model = make_model(self._settings, self._dataset, load_graph_apart)
        except DataError as error:
            raise DataError(f"{data}: {error}") from error
        out = settings.peers.out
        self._out = None if out is None else expanded(out)
        if self._out is not None:
            check_trained_out(self._out, settings, self._state, self._model.forward)

    def run(self) -> None:
        """Run it to its end, and write the trained model."""
        folder = DeviceFolder(self._state)
        try:
            peer = self._peer = self._make(folder)
            self._notifier.ready()
            reason = serve(
                peer, PROGRESS_S, self._tell_of_progress, self._state, notifier=self._notifier, hangs=self._hangs
            )
            if self._out is not None:
                write_trained(self._out, peer, self._model.forward)
        finally:
            folder.close()
        written = "" if self._out is None else f"; {self._out} is written"
        sentence = f"{reason}: {_work_done(peer)}{written}"
        self._printer.figures("stopped", {"reason": reason, **_figures(peer)}, sentence)

    def _make(self, folder: DeviceFolder) -> Peer:
        """Open the state folder for another start, and return that start's peer."""
        identity = folder.open(self._device_id, Readings().mark())
        for remark in folder.remarks:
            self._printer.event("warning", detail=remark)
        local, examples = self._settings.local, len(self._dataset)
        peer = make_peer(
            self._settings.peers,
            identity,
            self._state,
            self._model,
            examples_per_step=local.batch_size * local.accumulation_steps,
            examples=examples,
            step_s_min=self._section.step_s_min,
            on_report=self._tell,
        )
        board = "" if self._profile is None else f", profile {self._profile.name}"
        begun = f"{examples} examples, start {identity.incarnation}, {peer.steps_total} local steps before{board}"
        detail = f"{self._settings.peers.topology}, {begun}"
        self._printer.event("started", device=self._device_id, detail=detail)
        return peer

    def _tell(self, report: PeerReport) -> None:
        detail = ": ".join(filter(None, (report.peer, report.detail)))
        self._notifier.status(f"{HUBLESS} {report.event} {detail}")
        if report.event not in ("round_started", "round_done", "stopped"):
            self._printer.event(report.event, detail=detail)

    def _tell_of_progress(self) -> None:
        self._printer.figures("progress", _figures(self._peer), _work_done(self._peer))

    def _hangs(self) -> str:
        return hang_of(self._peer.stalled_s(), self._section)


def _figures(peer: Peer) -> dict[str, int | float | None]:
    return {
        "steps": peer.steps_total,
        "rounds": peer.times.rounds,
        "loss": peer.loss,
        "bytes_up": peer.bytes_up,
        "bytes_down": peer.bytes_down,
    }


def _work_done(peer: Peer) -> str:
    loss = "" if peer.loss is None else f", loss {peer.loss:.4g}"
    return f"{peer.steps_total} local steps, {peer.times.rounds} rounds{loss}"
