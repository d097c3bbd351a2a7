"""A peer as its settings describe it: its model and data, its state folder, and who the others are."""

import logging
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from edgeasync.config import expanded
from edgeasync.data.dataset import Dataset
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.files import check_out, replace_file
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.durable.peers_file import own_entry, read_first_peers
from edgeasync.errors import ConfigError
from edgeasync.graphs.export import ONNX_SUFFIX
from edgeasync.graphs.graph_model import HubGraph, load_graph
from edgeasync.graphs.model_file import VALUES_SUFFIX, check_finite, save_model
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.losses import OnnxLoss
from edgeasync.net.address import host_of
from edgeasync.runtime.peer import PEER_MODEL_FILE, OnReport, PeerMember, PeerModel, PeerRuntime
from edgeasync.runtime.peer_settings import PeerSettings
from edgeasync.training.plan import ReceivedGraph, ShippedModel, TrainingPlan

_log = logging.getLogger(__name__)


def make_model(
    settings: PeerSettings, dataset: Dataset, load: Callable[[OnnxModel], HubGraph] = load_graph
) -> PeerModel:
    """Return the model that the settings name, with a trainer on this device's data.

    All devices begin with the same values: the mean of unlike ones is worth less than each. Raises `ConfigError`,
    `GraphError` or `DataError`.
    """
    model, section = settings.model, settings.peer
    if model is None:
        raise ConfigError("which model? give --model FILE.onnx, or [model] in a settings file")
    if not isinstance(model, OnnxModel):
        plan = TrainingPlan(model=model, local=settings.local)
        return PeerModel(plan.make_trainer(dataset, section.seed), model.initial(0))
    graph = load(model)
    for warning in graph.warnings:
        _log.warning("%s: %s", model.file, warning)
    plan = TrainingPlan(model=ShippedModel(), local=settings.local)
    received = ReceivedGraph(graph.graph, graph.spec, section.cores_used, section.provider)
    trainer = plan.make_trainer(dataset, section.seed, received)
    return PeerModel(trainer, graph.initial.copy(), graph.forward, graph.frozen)


def make_peer(
    settings: PeerSettings,
    identity: DeviceIdentity,
    model: PeerModel,
    *,
    examples: int = 0,
    meets: bool = False,
    on_report: OnReport,
) -> PeerRuntime:
    """Return the peer of a device, not running yet; it resumes the model in its state folder.

    `examples` are those of its data, of which `epochs` are passes.

    Raises `ConfigError` for a list without this device and its key, `StorageError`, `ModelMismatchError`.
    """
    section = settings.peer
    assert section.state is not None
    assert section.peers is not None
    file, state = expanded(section.peers), expanded(section.state)
    pair = DeviceKeys(state).own()
    peers = read_first_peers(file, identity.device_id, pair.public)
    own = own_entry(file, peers, identity.device_id, pair.public)
    for entry in peers.peer:
        host_of(entry.address)  # raises AddressError
    if section.epochs is not None:
        section = replace(section, epochs=None, steps_max=settings.local.steps_of(section.epochs, examples))
    member = PeerMember(own, pair, peers, identity.incarnation, file)
    return PeerRuntime(
        member, section, model, model_file=state / PEER_MODEL_FILE, meets=meets, on_report=on_report
    )


def write_trained(out: Path, peer: PeerRuntime, forward: bytes | None) -> None:
    """Write a trained model: as ONNX for inference if `out` ends so, else its arrays as safetensors.

    Raises `StorageError`, also if training has diverged.
    """
    check_finite(out, peer.parameters, diverged=peer.diverged)
    if out.suffix != ONNX_SUFFIX:
        save_model(out, peer.spec, peer.parameters, lineage=peer.name, version=peer.steps_total, private=False)
        return
    assert forward is not None
    from edgeasync.autodiff.export import export_model  # noqa: PLC0415 - needs onnx

    replace_file(out, export_model(forward, dict(peer.spec.views(peer.parameters))), private=False)


def check_trained_out(out: Path, settings: PeerSettings, state: Path, forward: bytes | None) -> None:
    """Raise `ConfigError` if a trained model cannot be written to this file, or would replace another."""
    if out.suffix not in (ONNX_SUFFIX, VALUES_SUFFIX):
        raise ConfigError(f"out {out}: write a name that ends in {ONNX_SUFFIX} or {VALUES_SUFFIX}")
    check_out("out", out, state / PEER_MODEL_FILE, *_files_read(settings))
    if out.suffix == ONNX_SUFFIX and forward is None:
        raise ConfigError(
            f"out {out}: only a forward model of ONNX can be written as one; write {out.stem}{VALUES_SUFFIX}"
        )
    if not out.parent.is_dir():
        raise ConfigError(f"out {out}: there is no folder {out.parent}; make it, or choose another file")


def _files_read(settings: PeerSettings) -> list[Path]:
    """Return the files of a peer's own: the data, the list of peers, the model with its values, and its loss."""
    model = settings.model
    names: list[str | None] = [settings.peer.data, settings.peer.peers]
    if isinstance(model, OnnxModel):
        names += [model.file, str(Path(model.file).with_suffix(VALUES_SUFFIX))]
        names += [model.loss.file] if isinstance(model.loss, OnnxLoss) else []
    return [expanded(name) for name in names if name is not None]
