"""`edgeasync peer`."""

from pathlib import Path

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from edgeasync.cli.device import hang_of, read_settings, state_folder
from edgeasync.cli.output import Printer
from edgeasync.cli.outputs import PeerProgress
from edgeasync.cli.serving import serve
from edgeasync.cli.settings_flags import Flags, model_of, named_by_flag
from edgeasync.cli.under_systemd import find_notifier
from edgeasync.config import convert, expanded, to_table
from edgeasync.core.peer.effects import PeerReport
from edgeasync.data.files import load
from edgeasync.durable.identity import DeviceFolder
from edgeasync.errors import ConfigError, DataError
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.host.notify import HUBLESS
from edgeasync.host.readings import Readings
from edgeasync.ops.inspection import load_for_command
from edgeasync.runtime.peer import PeerRuntime
from edgeasync.runtime.peer_device import check_trained_out, find_name, make_model, make_peer, write_trained
from edgeasync.runtime.peer_settings import PeerSettings
from edgeasync.runtime.profiles import with_profile

PROGRESS_S = 10.0


def run_peer(config: Path | None, said: Flags, printer: Printer) -> None:
    """Run a peer with the settings of a file, flags, or both. Flags override the file."""
    settings = read_settings(config, PeerSettings, said)
    if model := said["model"]:
        before = to_table(settings.model)
        try:
            settings = replace(settings, model=convert(model_of(before, model), OnnxModel, where="flags"))
        except ConfigError as error:
            raise named_by_flag(error, model, {"file": "--model"}) from error
    _Command(settings, printer).run()


class _Command:
    """A peer that runs from the command line or under systemd."""

    def __init__(self, settings: PeerSettings, printer: Printer) -> None:
        if missing := settings.missing():
            raise ConfigError(missing)
        section, self._profile = with_profile(settings.peer, Readings())
        self._state = state_folder(section)
        self._settings = replace(settings, peer=replace(section, state=str(self._state)))
        self._section = self._settings.peer
        self._printer = printer
        self._notifier = find_notifier()
        self._device_id = find_name(section, self._state)
        data = expanded(str(section.data))
        self._dataset = load(data)
        try:
            self._model = make_model(self._settings, self._dataset, load_for_command)
        except DataError as error:
            raise DataError(f"{data}: {error}") from error
        self._out = None if section.out is None else expanded(section.out)
        if self._out is not None:
            check_trained_out(self._out, settings, self._state, self._model.forward)

    def run(self) -> None:
        """Run the peer until it ends, and write the trained model."""
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
        written = "" if self._out is None else f"; wrote {self._out}"
        sentence = f"{reason}: {_work_done(peer)}{written}"
        self._printer.figures("stopped", _figures(peer, reason=reason), sentence)

    def _make(self, folder: DeviceFolder) -> PeerRuntime:
        """Open the state folder for the next start, and create the peer."""
        identity = folder.open(self._device_id, Readings().mark())
        for remark in folder.remarks:
            self._printer.event("warning", detail=remark)
        examples = len(self._dataset)
        peer = make_peer(self._settings, identity, self._model, examples=examples, on_report=self._tell)
        board = "" if self._profile is None else f", profile {self._profile.name}"
        begun = f"{examples} examples, start {identity.incarnation}, {peer.steps_total} local steps before{board}"
        self._printer.event("started", device=self._device_id, detail=f"{self._section.topology}, {begun}")
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


def _figures(peer: PeerRuntime, *, reason: str | UnsetType = UNSET) -> PeerProgress:
    return PeerProgress(
        reason=reason,
        steps=peer.steps_total,
        rounds=peer.rounds,
        loss=peer.loss,
        bytes_up=peer.bytes_up,
        bytes_down=peer.bytes_down,
    )


def _work_done(peer: PeerRuntime) -> str:
    loss = "" if peer.loss is None else f", loss {peer.loss:.4g}"
    return f"{peer.steps_total} local steps, {peer.rounds} rounds{loss}"
