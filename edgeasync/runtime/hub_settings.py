"""A hub's settings file as frozen structs. `docs/settings.md` lists every key."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr, replace

from edgeasync.config import ByteCount, FilePath, Section, convert, expanded, to_table, whole_address
from edgeasync.core.hub.settings import (
    CheckpointSettings,
    CodecSettings,
    HubCoreSettings,
    Limits,
    Liveness,
    StopCondition,
    parse_every,
)
from edgeasync.data.files import load
from edgeasync.durable.checkpoint import CheckpointStore
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.history import ROWS_MAX
from edgeasync.durable.json_file import read_json
from edgeasync.errors import AddressError, ConfigError, DataError, StorageError
from edgeasync.graphs.evaluation import make_evaluator
from edgeasync.graphs.graph_model import FORWARD_FILE, HubGraph, load_graph, with_own_loss
from edgeasync.graphs.onnx_model import BUILD_S, OnnxModel
from edgeasync.graphs.user_code import CustomModel
from edgeasync.host.host_info import half_of_memory_bytes
from edgeasync.losses import CrossEntropy, find_loss, kind_of
from edgeasync.net.address import DEFAULT_ADDRESS, is_within_machine
from edgeasync.plugins import Trust, refuse_modules_in
from edgeasync.policies.frequency import AdaptiveFrequency
from edgeasync.policies.policy import Policy
from edgeasync.protocol.codecs import ELEMENTWISE
from edgeasync.protocol.messages import OtherFrozen
from edgeasync.runtime.hub import RECORD_FILE, HubRuntime, OnReport
from edgeasync.training.evaluation import Evaluator
from edgeasync.training.local_parameters import choose_local
from edgeasync.training.numpy_models import Model
from edgeasync.training.plan import CodeModel, LocalTraining, ShippedModel, TrainingPlan

_log = logging.getLogger(__name__)

RECORD_FORMAT = 1
"""Of `hub.json`, where it stands under `format`: the only format that is read. Increase it when a key changes."""


class HubSection(Section, frozen=True):
    """`[hub]`: where it listens, where its run lies, when it ends, whom it refuses, and if its fleet may rest.

    Without `quiet` the fleet rests if nothing in `stop` ends the run, and the frequency is adaptive.
    """

    bind: str = DEFAULT_ADDRESS
    run: FilePath = FilePath("runs/default")
    seed: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    durability: Literal["journal", "checkpoint"] = "journal"
    history_rows_max: Annotated[int, Meta(ge=0, le=1_000_000)] = ROWS_MAX
    stop: StopCondition = StopCondition()
    quiet: bool | None = None
    frozen: OtherFrozen = "refuse"
    keys: FilePath | None = None
    knocking: bool = False
    insecure: bool = False

    def __post_init__(self) -> None:
        force_setattr(self, "bind", whole_address(self.bind))

    @property
    def is_open(self) -> bool:
        """Whether anybody on a network may send updates."""
        here = is_within_machine(self.bind) or not self.bind.startswith("tcp://")
        return self.insecure and self.keys is None and not here


class EvaluationSection(Section, frozen=True):
    """`[evaluation]`: how often the model is evaluated, and on which data; without any, by the devices' losses."""

    data: FilePath | None = None
    every: str = "100 updates"

    def __post_init__(self) -> None:
        parse_every(self.every)

    @property
    def every_updates(self) -> int:
        """Updates between two evaluations, where these are counted."""
        updates, _ = parse_every(self.every)
        return int(updates) if updates < math.inf else 1

    @property
    def every_s(self) -> float | None:
        """Seconds between two evaluations; `None` if updates are counted."""
        _, seconds = parse_every(self.every)
        return seconds if seconds < math.inf else None


class RunSettings(Section, frozen=True):
    """All of a hub's settings but the model."""

    hub: HubSection = HubSection()
    local: LocalTraining = LocalTraining()
    policy: Policy = Policy()
    evaluation: EvaluationSection = EvaluationSection()
    codec: CodecSettings = CodecSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    liveness: Liveness = Liveness()
    limits: Limits = Limits()

    def core_settings(self) -> HubCoreSettings:
        """Return what of the settings is for the hub's core."""
        return HubCoreSettings(
            liveness=self.liveness,
            limits=self.limits,
            stop=self.hub.stop,
            checkpoint=self.checkpoint,
            evaluate_every_updates=self.evaluation.every_updates,
            evaluate_every_s=self.evaluation.every_s,
            quiet=self.quiet,
            codec=self.codec,
            frozen=self.hub.frozen,
        )

    @property
    def fleet_policy(self) -> Policy:
        """The policy. Unless it says so itself, who may reach the hub decides whether it trusts its devices.

        Raises `ConfigError` for a policy that cannot do without trust.
        """
        if not isinstance(self.policy, Policy) or self.policy.trust is not None:
            return self.policy
        try:
            return replace(self.policy, trust="open" if self.hub.is_open else "admitted")
        except ValueError as error:
            raise ConfigError(
                f"policy: {error}. This hub is open to all, so it combines updates robustly: change that, give "
                "the hub keys, or set policy.trust = 'admitted' if you trust all who reach it"
            ) from error

    @property
    def quiet(self) -> bool:
        """Whether the fleet may rest while the model stands still."""
        if self.hub.quiet is not None:
            return self.hub.quiet
        return self.hub.stop == StopCondition() and isinstance(self.policy.frequency, AdaptiveFrequency)


class HubSettings(RunSettings, frozen=True, kw_only=True):
    """A hub's settings file: everything has a default but the model."""

    model: Model | OnnxModel | CustomModel

    def __post_init__(self) -> None:
        if self.hub.quiet and not isinstance(self.policy.frequency, AdaptiveFrequency):
            raise ValueError("hub.quiet needs policy.frequency.kind = 'adaptive': another one keeps its own pace")
        if self.evaluation.data is not None and self.model.local:
            raise ValueError(
                "evaluation.data needs a whole model, and each device has its own values of model.local: leave it "
                "out; the hub then evaluates by the losses of the devices"
            )
        if self.evaluation.data is not None and isinstance(self.model, CustomModel):
            raise ValueError(
                "evaluation.data needs a model that the hub can run, which model.kind = 'custom' is not: leave it "
                "out; the hub then evaluates by the losses of the devices"
            )
        if self.hub.stop.accuracy is not None and self.evaluation.data is None:
            raise ValueError("hub.stop.accuracy needs held-out data to measure it on: give evaluation.data")
        if self.hub.stop.accuracy is not None and isinstance(self.model, OnnxModel):
            loss = find_loss(self.model.loss)
            if not isinstance(loss, CrossEntropy):
                raise ValueError(
                    "hub.stop.accuracy would never end training: only the loss cross_entropy has an accuracy, and "
                    f"model.loss is {kind_of(loss)}; take hub.stop.loss, plateau, minutes or updates"
                )
        if self.policy.aggregate.update == "model" and self.codec.push not in ("auto", *ELEMENTWISE):
            raise ValueError(
                f"codec.push = {self.codec.push!r} would lose too much of the whole models that devices send "
                f"under policy.aggregate: take 'auto' or one of {', '.join(ELEMENTWISE)}"
            )
        for path, part in (("policy", self.policy), ("policy.warm_up", self.policy.warm_up)):
            count = None if part is None else getattr(part.aggregate, "count", None)
            if count is not None and count > self.limits.updates_held_max:
                raise ValueError(
                    f"{path}.aggregate.count ({count}) is over the {self.limits.updates_held_max} of "
                    "limits.updates_held_max"
                )

    def make_hub(
        self,
        on_report: OnReport | None = None,
        *,
        load: Callable[[OnnxModel], HubGraph] = load_graph,
        trust_code: bool = False,
    ) -> HubRuntime:
        """Return a hub that is not yet running; raises `AddressError`, `ConfigError` or `GraphError`.

        `load` builds the training graph of an ONNX model: in this process, unless another way is given. With
        `trust_code` the hub imports plugins that only the run's folder names.
        """
        refuse_modules_in(expanded(self.hub.run))
        if (policy := self.fleet_policy) is not self.policy:
            return replace(self, policy=policy).make_hub(on_report, load=load, trust_code=trust_code)
        if isinstance(self.model, OnnxModel) and (own := with_own_loss(self.model)) != self.model:
            settings = replace(self, model=own)  # its record then needs no file
            return settings.make_hub(on_report, load=load, trust_code=trust_code)
        if self.hub.bind.startswith("inproc:"):
            raise AddressError(f"{self.hub.bind}: no other process could reach it; write tcp://HOST:PORT")
        model: Model | ShippedModel | CodeModel
        loaded: HubGraph | None = None
        if isinstance(self.model, OnnxModel):
            loaded = built = load(self.model)
            for warning in built.warnings:
                _log.warning("%s: %s", self.model.file, warning)
            self.local.check_model(built.spec, None if built.forward is None else kind_of(self.model.loss))
            spec, initial = built.spec, lambda: built.initial
            model, graph, forward = ShippedModel(local=self.model.local), built.graph, built.forward
        elif isinstance(self.model, CustomModel):
            spec, first = self.model.load()
            model, graph, forward, initial = CodeModel(local=self.model.local), None, None, lambda: first
        else:
            model, graph, forward = self.model, None, None
            self.local.check_model(model.spec, "cross_entropy")
            spec, initial = model.spec, lambda: model.initial(self.hub.seed)
        if self.model.local:
            choose_local(spec, self.model.local)
        return HubRuntime(
            evaluator=self._make_evaluator(loaded),
            spec=spec,
            initial=initial,
            policy=self.policy,
            bind=self.hub.bind,
            run=expanded(self.hub.run),
            settings=self.core_settings(),
            training=TrainingPlan(model=model, local=self.local).table(),
            graph=graph,
            forward=forward,
            frozen=None if loaded is None else loaded.frozen,
            durability=self.hub.durability,
            history_rows_max=self.hub.history_rows_max,
            keys=None if self.hub.keys is None else expanded(self.hub.keys),
            knocking=self.hub.knocking,
            insecure=self.hub.insecure,
            trust_code=trust_code,
            record=self.record(),
            on_report=on_report,
        )

    def record(self) -> bytes:
        """Return the settings as JSON, to begin the same hub from any folder.

        To resume from another checkpoint than the latest is done once, and not noted.
        """
        latest, run = CheckpointSettings().recovery, FilePath.parse(self.hub.run)  # which the default is not yet
        noted = replace(
            self,
            hub=replace(self.hub, run=run),
            checkpoint=replace(self.checkpoint, recovery=latest),
        )
        table = {"format": RECORD_FORMAT} | to_table(noted)
        return msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n"

    def _make_evaluator(self, loaded: HubGraph | None) -> Evaluator | None:
        if self.evaluation.data is None or isinstance(self.model, CustomModel):
            return None
        path = expanded(self.evaluation.data)
        try:
            return make_evaluator(self.model, loaded, load(path))
        except DataError as error:
            raise DataError(f"evaluation.data: {error}") from error


def has_checkpoint(run: Path) -> bool:
    """Return whether there is anything in a folder that a hub could resume."""
    return run.is_dir() and any(CheckpointStore(FolderDisk(run), keep=1).manifests())


def read_record(run: Path, *, trust_code: bool = False) -> HubSettings:
    """Return the settings of the last start of the run in a folder, to resume it there.

    Without `trust_code` they name no code but installed plugins, and raise no limit of building a model.

    Raises `StorageError` if there is nothing to resume, or no settings, or if another version wrote them;
    `ConfigError` if they are not settings; `PluginError` if they name code that may not be imported.
    """
    refuse_modules_in(run)
    if not run.is_dir():
        raise StorageError(f"{run}: no such folder; give the folder of a hub's run")
    path = run / RECORD_FILE
    begin = f"begin by a settings file: edgeasync hub CONFIG --run {run}"
    if not has_checkpoint(run):
        raise StorageError(f"{run}: has no checkpoint to resume from; {begin}")
    try:
        table = read_json(path, dict[str, Any], remedy=begin)
    except FileNotFoundError:
        raise StorageError(
            f"{path}: no such file, so its settings are not known; if a Python program began the run, start that "
            f"again; else {begin}"
        ) from None
    written = table.pop("format", None)
    if not isinstance(written, int):
        raise StorageError(f"{path}: has no format, so it is damaged, or not a run's of edgeasync; {begin}")
    if written != RECORD_FORMAT:
        raise StorageError(
            f"{path}: is of format {written}, and this edgeasync reads format {RECORD_FORMAT}; "
            f"start the version of edgeasync that wrote it; or {begin}"
        )
    trust = Trust(installed=True, code=trust_code)
    settings = convert(table, HubSettings, where=str(path), find=trust.find_policy)
    model, forward = settings.model, run / FORWARD_FILE
    if isinstance(model, CustomModel):
        trust.check_code(model.factory, f"{path}: [model] factory")
    if isinstance(model, OnnxModel) and not trust_code:
        model = _within_limits(model)
    if isinstance(model, OnnxModel) and forward.exists():
        model = replace(model, file=FilePath.parse(forward))  # wherever the folder has come from
    return replace(settings, model=model, hub=replace(settings.hub, run=FilePath.parse(run)))


def _within_limits(model: OnnxModel) -> OnnxModel:
    """Return a model without limits of its building that are over the default ones."""
    nbytes = model.build_memory_bytes_max
    if nbytes is not None:
        nbytes = ByteCount(min(nbytes, half_of_memory_bytes() or nbytes))
    return replace(model, build_s_max=min(model.build_s_max, BUILD_S), build_memory_bytes_max=nbytes)
