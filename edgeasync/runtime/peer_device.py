"""A peer as its settings describe it: its model and data, its state folder, and who the others are."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from edgeasync.config import expanded
from edgeasync.core.device.throttle import ThrottleSection
from edgeasync.data.dataset import Dataset
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.files import check_out, replace_file
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.durable.peers_file import own_entry, read_first_peers
from edgeasync.errors import ConfigError
from edgeasync.graphs.export import ONNX_SUFFIX
from edgeasync.graphs.graph_model import HubGraph, load_graph
from edgeasync.graphs.model_file import VALUES_SUFFIX, check_finite, load_kept, save_model
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.losses import OnnxLoss
from edgeasync.net.address import host_of
from edgeasync.parameters import Vector
from edgeasync.protocol.messages import Frozen
from edgeasync.runtime.agent_settings import AgentSection, AgentSettings, PeersSection
from edgeasync.runtime.peer import PEER_MODEL_FILE, OnReport, Peer
from edgeasync.training.plan import ReceivedGraph, ShippedModel, TrainingPlan
from edgeasync.training.trainer import CoroutineTrainer, Trainer

_log = logging.getLogger(__name__)

OF_A_HUB = (
    "hub",
    "trainer",
    "micro_batch_size",
    "local_steps_max",
    "delay_steps",
    "bandwidth_bytes_per_s_max",
    "link_share",
    "bytes_per_day_max",
    "spool",
    "alone_steps_max",
    "local",
    "enrol",
    "hub_key",
    "insecure",
    "when_finished",
)
"""Keys of `[agent]` that only an agent with a hub keeps to."""


class PeerModel(NamedTuple):
    """What a peer trains: its trainer, the values it begins with, and the forward model if it is of ONNX.

    `frozen` is the checksum of the model's arrays that do not travel.
    """

    trainer: Trainer | CoroutineTrainer
    initial: Vector
    forward: bytes | None = None
    frozen: Frozen | None = None


def find_unkept(section: AgentSection, throttle: ThrottleSection) -> str | None:
    """Return a setting of `[agent]` or `[throttle]` that an agent without a hub would not keep to, if any."""
    usual = AgentSection()
    if throttle != ThrottleSection():
        return "[throttle]"
    return next((key for key in OF_A_HUB if getattr(section, key) != getattr(usual, key)), None)


def make_model(
    settings: AgentSettings, dataset: Dataset, load: Callable[[OnnxModel], HubGraph] = load_graph
) -> PeerModel:
    """Return the model that the settings name, with a trainer on this device's data.

    All devices begin with the same values: the mean of unlike ones is worth less than each. Raises `ConfigError`,
    `GraphError` or `DataError`.
    """
    model, section = settings.model, settings.agent
    if model is None:
        raise ConfigError("which model? without a hub give --model FILE.onnx, or [model] in a settings file")
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
    section: PeersSection,
    identity: DeviceIdentity,
    state: Path,
    model: PeerModel,
    *,
    examples_per_step: int,
    examples: int,
    step_s_min: float = 0.0,
    meets: bool = False,
    on_report: OnReport,
) -> Peer:
    """Return the peer of a device, not running yet; it resumes the model in its state folder.

    With `meets` it takes its first step once it has met all others of the list, or after a lease.

    Raises `ConfigError` for a list without this device and its key, `StorageError`, `ModelMismatchError`.
    """
    assert section.peers is not None
    file, pair = expanded(section.peers), DeviceKeys(state).own()
    peers = read_first_peers(file, identity.device_id, pair.public)
    own = own_entry(file, peers, identity.device_id, pair.public)
    for entry in peers.peer:
        host_of(entry.address)  # raises AddressError
    kept = state / PEER_MODEL_FILE
    parameters, steps = load_kept(kept, model.trainer.spec, model.initial)
    steps_max = section.steps_max
    if section.epochs is not None:
        steps_max = math.ceil(section.epochs * examples / examples_per_step)
    return Peer(
        own,
        pair,
        peers,
        incarnation=identity.incarnation,
        trainer=model.trainer,
        parameters=parameters,
        settings=section.core_settings(),
        file=file,
        bind=section.bind,
        meets=meets,
        frozen=model.frozen,
        steps_max=steps_max,
        rounds_max=section.rounds_max,
        steps_total=steps,
        step_s_min=step_s_min,
        model_file=kept,
        on_report=on_report,
    )


def write_trained(out: Path, peer: Peer, forward: bytes | None) -> None:
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


def check_trained_out(out: Path, settings: AgentSettings, state: Path, forward: bytes | None) -> None:
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


def _files_read(settings: AgentSettings) -> list[Path]:
    """Return the files of a peer's own: the data, the list of peers, the model with its values, and its loss."""
    model = settings.model
    names: list[str | None] = [settings.agent.data, settings.peers.peers]
    if isinstance(model, OnnxModel):
        names += [model.file, str(Path(model.file).with_suffix(VALUES_SUFFIX))]
        names += [model.loss.file] if isinstance(model.loss, OnnxLoss) else []
    return [expanded(name) for name in names if name is not None]
