"""Inspects a model file: what it contains, what is trained, and what training costs."""

from pathlib import Path

import msgspec

from edgeasync.autodiff.contents import ModelContents, TensorInfo
from edgeasync.autodiff.settings import advised_flags
from edgeasync.core.hub.codec_agreement import CodecAgreement
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.settings import CodecSettings
from edgeasync.errors import GraphError, with_flags
from edgeasync.graphs.graph_model import HubGraph
from edgeasync.graphs.graph_process import describe_model_apart, load_graph_apart, memory_bytes_max
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.graphs.split_base import base_bytes_of
from edgeasync.graphs.step_process import MeasuredStep, measure_step
from edgeasync.host.readings import Readings
from edgeasync.measurements.device import DeviceMeasurements
from edgeasync.parameters import ParameterSpec, Role
from edgeasync.policies.policy import Policy
from edgeasync.protocol.codecs import known_stages, make_codec
from edgeasync.protocol.messages import DeviceProfile
from edgeasync.runtime.agent_settings import AgentSection
from edgeasync.runtime.profiles import with_profile
from edgeasync.structs import parse_json


class Payload(msgspec.Struct, frozen=True):
    """The codec of a payload, and its maximum size in bytes."""

    codec: str
    bytes: int


class ExchangeSize(msgspec.Struct, frozen=True):
    """Payloads with the hub's default codecs, on a link that is neither slow nor very fast.

    In an exchange, a device sends `up` and receives `down`. A device that joins receives `whole`.
    """

    up: Payload
    down: Payload
    whole: Payload


class ArrayInfo(msgspec.Struct, frozen=True):
    """A trained array, or a running statistic that training updates: `role` tells which."""

    name: str
    shape: list[int]
    role: Role


class TrainingSummary(msgspec.Struct, frozen=True):
    """What is trained, and the cost.

    `output` is the tensor that the loss compares with `target`. `frozen` is the number of values
    that are not trained. `graph_bytes` is the size of the training graph, and `base_bytes` that of
    its frozen values, if they are a file of their own. A device receives both once. `step` was
    measured on this machine with `threads` cores, an agent's default; it is null if the step
    failed, and `step_problem` is the reason.
    """

    output: str
    loss: str
    target: TensorInfo
    parameters: int
    statistics: int
    frozen: int
    arrays: list[ArrayInfo]
    graph_nodes: int
    graph_bytes: int
    base_bytes: int
    exchange: ExchangeSize
    threads: int
    step: MeasuredStep | None
    step_problem: str | None


class Inspection(msgspec.Struct, frozen=True):
    """A model file.

    If it cannot be trained, `training` is null and `problem` is the reason. `flags` are those to
    try next, if flags can solve the problem. `warnings` tell what may be wrong with the file, and
    `notes` what the build chose or changed.
    """

    contents: ModelContents
    training: TrainingSummary | None
    problem: str | None
    flags: list[str]
    warnings: list[str]
    notes: list[str]


def load_for_command(model: OnnxModel) -> HubGraph:
    """Load a model in a separate process. Its warnings and notes name command-line flags.

    Raises the errors of `load_graph_apart`.
    """
    return load_graph_apart(model).with_flags()


def inspect_file(model: OnnxModel, batch_size: int) -> Inspection:
    """Build the training graph of a model file, and measure a step of `batch_size` examples.

    Raises `ConfigError`, and `GraphError` if the file cannot even be read.
    """
    try:
        built = load_for_command(model)
    except GraphError as error:
        contents = describe_model_apart(model)
        if contents is None:
            raise
        flags = advised_flags(model, str(error))
        return Inspection(contents, None, with_flags(str(error)), flags, [], [])
    from edgeasync.autodiff.inspection import describe  # noqa: PLC0415 - imports onnx

    contents = describe(built.graph if built.forward is None else built.forward, trains=True)
    training = _training(built.graph, built.spec, model, batch_size)
    return Inspection(contents, training, None, [], [*built.warnings], [*built.notes])


def _training(graph: bytes, spec: ParameterSpec, model: OnnxModel, batch_size: int) -> TrainingSummary:
    # If onnx is missing, loading the model reports this.
    from edgeasync.autodiff.inspection import frozen_values, info_of  # noqa: PLC0415
    from edgeasync.autodiff.losses import TARGET  # noqa: PLC0415
    from edgeasync.autodiff.serialization import detach  # noqa: PLC0415

    section, _ = with_profile(AgentSection(), Readings(Path("/")))
    step, problem = None, None
    try:
        step = measure_step(
            graph,
            spec,
            batch_size,
            threads=section.cores_used,
            s_max=model.build_s_max,
            bytes_max=memory_bytes_max(model),
        )
    except GraphError as error:
        problem = str(error)
    proto = detach(graph).model
    base_bytes = base_bytes_of(graph)
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    return TrainingSummary(
        output=metadata["edgeasync.output"],
        loss=str(parse_json(metadata["edgeasync.loss"], dict[str, object])["kind"]),
        target=next(info_of(entry) for entry in proto.graph.input if entry.name == TARGET),
        parameters=spec.trained_length,
        statistics=spec.length - spec.trained_length,
        frozen=frozen_values(proto),
        arrays=[ArrayInfo(each.name, list(each.shape), each.role) for each in spec.parameters],
        graph_nodes=len(proto.graph.node),
        graph_bytes=len(graph) - base_bytes,
        base_bytes=base_bytes,
        exchange=usual_exchange(spec),
        threads=section.cores_used,
        step=step,
        step_problem=problem,
    )


def usual_exchange(spec: ParameterSpec) -> ExchangeSize:
    """Return the payloads of an exchange between a hub and a device with default settings."""
    settings = CodecSettings()
    device = Member("", b"", 0, DeviceProfile(), DeviceMeasurements())
    CodecAgreement(settings, Policy(), spec.length).greet(device, known_stages())

    def payload(codec: str) -> Payload:
        return Payload(codec, make_codec(codec, spec).payload_bytes_max)

    down = settings.delta if device.follows else device.codec_model
    return ExchangeSize(payload(device.codec_push), payload(down), payload(device.codec_model))
