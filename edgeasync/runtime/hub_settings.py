"""A hub's settings file as frozen structs. `docs/reference/settings/index.md` lists every key."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta
from msgspec.structs import force_setattr, replace

from edgeasync.config import FilePath, Section, whole_address
from edgeasync.core.hub.settings import (
    CheckpointSettings,
    CodecSettings,
    EvaluationSettings,
    HubCoreSettings,
    Limits,
    Liveness,
    StopCondition,
    check_day,
)
from edgeasync.durable.history import ROWS_MAX
from edgeasync.durable.run import Durability
from edgeasync.errors import ConfigError
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.graphs.user_code import CustomModel
from edgeasync.losses import CrossEntropy, find_loss, kind_of
from edgeasync.net.address import DEFAULT_ADDRESS, is_within_machine
from edgeasync.policies.frequency import AdaptiveFrequency
from edgeasync.policies.policy import Policy
from edgeasync.protocol.codecs import ELEMENTWISE
from edgeasync.protocol.messages import Frozen, OtherFrozen
from edgeasync.training.numpy_models import Model
from edgeasync.training.plan import LocalTraining


class HubSection(Section, frozen=True):
    """`[hub]`: where it listens, where its run lies, when it ends, whom it refuses, and if its fleet may rest.

    Without `quiet` the fleet rests if nothing in `stop` ends the run, and the frequency is adaptive.
    """

    GROUPS: ClassVar[Mapping[str, str]] = {"bind": "Connection", "run": "Run", "keys": "Connection"}

    bind: str = DEFAULT_ADDRESS
    """Where to listen: `tcp://HOST:PORT`, or `ipc://PATH` for one machine. HOST is an address of this machine
    (IPv6 in brackets), or `*` for all. Port `*` takes any free one. A relative PATH is made absolute when it is
    read.
    """
    run: FilePath = FilePath("runs/default")
    """Folder of this run, made if missing. If the folder holds a run, the hub resumes it. If the folder holds only
    a `model.safetensors`, the run begins with that model.
    [Crashes, backups, moving](/operate/durability.md) lists its files.
    """
    seed: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    """Seed of the model's first values. It has no effect on an ONNX model, which brings its values, or when the
    folder holds a model.
    """
    durability: Durability = "journal"
    """When the hub answers a device: after its update is on disk (`journal`), or at once (`checkpoint`). With
    `journal` an answered update outlives a crash or a power cut. With `checkpoint` a crash loses all updates after
    the last checkpoint, but answers do not wait for the disk.
    """
    history_rows_max: Annotated[int, Meta(ge=0, le=1_000_000)] = ROWS_MAX
    """Most rows of the run's history; 0: no history. It has one for each update and each evaluation, of about 30
    bytes: [The history](/operate/durability.md#the-history).
    """
    stop: StopCondition = StopCondition()
    """When training ends; `[hub.stop]`."""
    quiet: bool | None = None
    """Let the fleet rest while the model stands still: [Rest](/train/policies.md#rest). Without this key it
    does if nothing in `stop` ends the run and `policy.frequency` is `adaptive`. `true` needs an `adaptive`
    frequency."""
    frozen: OtherFrozen = "refuse"
    """What to do with a device whose frozen arrays differ: refuse it, or warn and let it train. A device that is
    refused ends with exit code 5: [Frozen parameters](/train/join.md#frozen-parameters).
    """
    keys: FilePath | None = None
    """Folder of this hub's keys, made by `edgeasync keys init`. With it the hub encrypts every connection and lets
    in only listed keys: [Keys](/operate/keys.md).
    """
    knocking: bool = False
    """Record unknown keys, for `edgeasync keys pending`. It needs `keys`."""
    insecure: bool = False
    """Without keys: listen beyond this machine, where anybody on the network may join. A host name counts as this
    machine if all its addresses are loopback. `ipc://@NAME` does not: every user of the machine may open it.
    """

    def __post_init__(self) -> None:
        force_setattr(self, "bind", whole_address(self.bind))

    @property
    def is_open(self) -> bool:
        """Whether anybody on a network may send updates."""
        here = is_within_machine(self.bind) or not self.bind.startswith("tcp://")
        return self.insecure and self.keys is None and not here


class RunSettings(Section, frozen=True):
    """All of a hub's settings but the model."""

    hub: HubSection = HubSection()
    """Address, folder of the run, end of training."""
    local: LocalTraining = LocalTraining()
    """How a device trains between two exchanges."""
    policy: Policy = Policy()
    """How the hub weighs, gathers and applies updates. [Policies](/train/policies.md) says which kind suits
    which fleet."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """On which data the hub evaluates the model, and how often."""
    codec: CodecSettings = CodecSettings()
    """How payloads are coded."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """How often the hub writes its state, and from which checkpoint a start resumes."""
    liveness: Liveness = Liveness()
    """When the hub counts a device as lost."""
    limits: Limits = Limits()
    """The most that the hub accepts."""

    def __post_init__(self) -> None:
        check_day(self.limits, self.liveness)

    def core_settings(self, *, held_out: bool = False, frozen_arrays: Frozen | None = None) -> HubCoreSettings:
        """Return what of the settings is for the hub's core, with what it knows of the evaluator and the model."""
        return HubCoreSettings(
            liveness=self.liveness,
            limits=self.limits,
            stop=self.hub.stop,
            checkpoint=self.checkpoint,
            evaluation=replace(self.evaluation, data=None),  # on which data decides nothing in the core
            quiet=self.quiet,
            codec=self.codec,
            frozen=self.hub.frozen,
            held_out=held_out,
            frozen_arrays=frozen_arrays,
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
    """What the fleet trains; `[model]` below. `--model` may stand for it."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
