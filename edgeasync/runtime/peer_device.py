"""Create a peer, with its model, data, state folder and list of peers, from its settings."""

import logging
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from edgeasync.config import expanded
from edgeasync.data.dataset import Dataset
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.files import check_out, replace_file
from edgeasync.durable.identity import DeviceIdentity, default_device_id
from edgeasync.durable.keys import Token
from edgeasync.durable.peers_file import (
    PeerEntry,
    Peers,
    own_entry,
    read_first_peers,
    read_peers,
    write_peers,
)
from edgeasync.errors import ConfigError
from edgeasync.graphs.export import ONNX_SUFFIX
from edgeasync.graphs.graph_model import HubGraph, files_of, load_graph
from edgeasync.graphs.model_file import VALUES_SUFFIX, check_finite, save_model
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.net.address import host_of
from edgeasync.net.credentials import find_credentials
from edgeasync.runtime.peer import PEER_MODEL_FILE, OnReport, PeerMember, PeerModel, PeerRuntime
from edgeasync.runtime.peer_settings import PeerSection, PeerSettings
from edgeasync.training.plan import ReceivedGraph, ShippedModel, TrainingPlan

FOUND_PEERS_FILE = "peers.toml"
"""The name of the list of peers in the state folder of a device that finds peers through a hub."""

_log = logging.getLogger(__name__)


def make_model(
    settings: PeerSettings, dataset: Dataset, load: Callable[[OnnxModel], HubGraph] = load_graph
) -> PeerModel:
    """Return the model that the settings specify, with a trainer on this device's data.

    All peers begin with the same initial values, because the mean of differently initialized models
    is worse than each of these models. Raises `ConfigError`, `GraphError` or `DataError`.
    """
    model, section = settings.model, settings.peer
    if model is None:
        raise ConfigError("no model is set; pass --model FILE.onnx, or set [model] in a settings file")
    if not isinstance(model, OnnxModel):
        plan = TrainingPlan(model=model, local=settings.local)
        return PeerModel(plan.make_trainer(dataset, section.seed), model.initial(0))
    graph = load(model)
    for remark in graph.remarks:
        _log.warning("%s: %s", model.file, remark)
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
    """Create a device's peer without starting it; it resumes from the model in its state folder, if any.

    `examples` is the device's number of examples, which is used to convert `epochs` to local steps.

    Raises `ConfigError` if the list does not contain this device or its key. Raises `StorageError`
    or `ModelMismatchError` if the peer cannot resume.
    """
    section = settings.peer
    assert section.state is not None
    state = expanded(section.state)
    member = _member_of(section, identity, state)
    for entry in member.peers.peer:
        host_of(entry.address)  # raises AddressError
    if section.epochs is not None:
        section = replace(section, epochs=None, steps_max=settings.local.steps_of(section.epochs, examples))
    return PeerRuntime(
        member, section, model, model_file=state / PEER_MODEL_FILE, meets=meets, on_report=on_report
    )


def _member_of(section: PeerSection, identity: DeviceIdentity, state: Path) -> PeerMember:
    """Return this device as a member of its list, which comes from a file or from a hub.

    If it comes from a hub, the hub's earlier answers are read from the state folder.
    """
    keys = DeviceKeys(state)
    pair, name = keys.own(), identity.device_id
    if section.hub is None:
        assert section.peers is not None
        file = expanded(section.peers)
        peers = read_first_peers(file, name, pair.public)
        return PeerMember(own_entry(file, peers, name, pair.public), pair, peers, identity.incarnation, file)
    assert section.address is not None
    hub = find_credentials(section.hubs, keys, section.enrol, knocking=False, insecure=False)
    file, own = state / FOUND_PEERS_FILE, PeerEntry(name, section.address, pair.public.hex())
    peers = (read_peers(file) if file.exists() else Peers()).with_found([own])
    write_peers(file, peers)
    return PeerMember(own, pair, peers, identity.incarnation, file, hub)


def find_name(section: PeerSection, state: Path) -> str:
    """Return a peer's name: from its settings, its enrolment or the host name.

    Raises `StorageError`.
    """
    if section.device_id is not None or section.hub is None:
        return section.device_id or default_device_id()
    return DeviceKeys(state).hub().name if section.enrol is None else Token.read(section.enrol).name


def write_trained(out: Path, peer: PeerRuntime, forward: bytes | None) -> None:
    """Write a trained model to `out`.

    If the name ends in `.onnx`, the file is an ONNX model for inference, otherwise it is a
    safetensors file. Raises `StorageError` if the file cannot be written or training has diverged.
    """
    check_finite(out, peer.parameters, diverged=peer.diverged)
    if out.suffix != ONNX_SUFFIX:
        save_model(out, peer.spec, peer.parameters, lineage=peer.name, version=peer.steps_total, private=False)
        return
    assert forward is not None
    from edgeasync.autodiff.export import export_model  # noqa: PLC0415 - needs onnx

    replace_file(out, export_model(forward, dict(peer.spec.views(peer.parameters))), private=False)


def check_trained_out(out: Path, settings: PeerSettings, state: Path, forward: bytes | None) -> None:
    """Raise `ConfigError` if a trained model cannot be written to `out`, or `out` is an input file."""
    if out.suffix not in (ONNX_SUFFIX, VALUES_SUFFIX):
        raise ConfigError(
            f"out {out}: unknown file type; choose a name that ends in {ONNX_SUFFIX} or {VALUES_SUFFIX}"
        )
    check_out("out", out, state / PEER_MODEL_FILE, *_files_read(settings))
    if out.suffix == ONNX_SUFFIX and forward is None:
        raise ConfigError(
            f"out {out}: this run has no ONNX forward model to export; choose {out.stem}{VALUES_SUFFIX}"
        )
    if not out.parent.is_dir():
        raise ConfigError(f"out {out}: no folder {out.parent}; create it, or choose another file")


def _files_read(settings: PeerSettings) -> list[Path]:
    """Return a peer's input files: data, list of peers, model with its values, and loss model."""
    own = [expanded(name) for name in (settings.peer.data, settings.peer.peers) if name is not None]
    return own + (files_of(settings.model) if isinstance(settings.model, OnnxModel) else [])
