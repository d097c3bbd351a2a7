"""Define a hub's settings file as frozen structs.

`docs/reference/settings/index.md` lists every key.
"""

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
from edgeasync.runtime.page_settings import MetricsSection, PageSection
from edgeasync.training.numpy_models import Model
from edgeasync.training.plan import LocalTraining

MANY_NAMES = (
    "without keys one machine may join under many names, and policy.trust = 'open' cannot prevent that; set keys"
)
"""The warning of a hub that admits anybody."""


class HubSection(Section, frozen=True):
    """`[hub]`: the hub's address, its run's folder, its keys and the end of training.

    By default, the fleet may idle if `stop` contains no condition and the frequency controller is
    adaptive. `quiet` overrides this.
    """

    GROUPS: ClassVar[Mapping[str, str]] = {"bind": "Connection", "run": "Run", "keys": "Connection"}

    bind: str = DEFAULT_ADDRESS
    """Address to listen on: `tcp://HOST:PORT`, or `ipc://PATH` for one machine. HOST is an address
    of this machine (IPv6 in brackets), or `*` for all addresses. If PORT is `*`, the hub listens on
    a free port. A relative PATH is converted to an absolute path when the setting is read.
    """
    run: FilePath = FilePath("runs/default")
    """Folder of this run, created if missing. If the folder contains a run, the hub resumes it. If
    the folder contains only a `model.safetensors`, the run begins with that model. [Crashes,
    backups, moving](/operate/durability.md) lists its files.
    """
    seed: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    """Random seed of the model's initial values. It has no effect on an ONNX model, which contains
    its initial values. It also has no effect if the run's folder contains a model.
    """
    durability: Durability = "journal"
    """When the hub answers a device: after the device's update is on disk (`journal`), or at once
    (`checkpoint`). With `journal`, every answered update survives a crash or a power cut. With
    `checkpoint`, answers do not wait for the disk, but a crash loses all updates after the last
    checkpoint.
    """
    history_rows_max: Annotated[int, Meta(ge=0, le=1_000_000)] = ROWS_MAX
    """Maximum number of rows in the run's history, or 0 to disable the history. Each update and
    each evaluation adds a row of about 30 bytes: [The history](/operate/durability.md#the-history).
    """
    stop: StopCondition = StopCondition()
    """When training ends: `[hub.stop]`."""
    quiet: bool | None = None
    """Let the fleet idle once training has plateaued: [Rest](/train/policies.md#rest). By default,
    the fleet may idle if `stop` contains no condition and `policy.frequency` is `adaptive`. `true`
    requires that `policy.frequency` is `adaptive`.
    """
    frozen: OtherFrozen = "refuse"
    """How to treat a device whose frozen arrays differ from the hub's: refuse it (`refuse`), or
    warn and let it train (`warn`; but a run of an ONNX model resumes only on its own base). A
    refused device ends with exit code 5: [Frozen parameters](/train/join.md#frozen-parameters).
    """
    keys: FilePath | None = None
    """Folder of this hub's keys, created by `edgeasync keys init`. With keys, the hub encrypts
    every connection and admits only listed keys: [Keys](/operate/keys.md).
    """
    knocking: bool = False
    """Record the unknown keys of devices that request admission, for `edgeasync keys pending`. Requires `keys`.
    """
    insecure: bool = False
    """Listen beyond this machine without keys, so that anybody on the network may join. A host name
    counts as this machine if all its addresses are loopback addresses. An address `ipc://@NAME`
    does not count as this machine, because every user of the machine can connect to it.
    """

    def __post_init__(self) -> None:
        force_setattr(self, "bind", whole_address(self.bind))

    @property
    def is_open(self) -> bool:
        """Whether anybody on a network may send updates."""
        here = is_within_machine(self.bind) or not self.bind.startswith("tcp://")
        return self.insecure and self.keys is None and not here


class RunSettings(Section, frozen=True):
    """All settings of a hub except the model."""

    hub: HubSection = HubSection()
    """The hub's address, its run's folder and the end of training."""
    local: LocalTraining = LocalTraining()
    """How a device trains between two exchanges."""
    policy: Policy = Policy()
    """How the hub weighs, aggregates and applies updates. [Policies](/train/policies.md) explains
    which kind suits which fleet.
    """
    evaluation: EvaluationSettings = EvaluationSettings()
    """How often the hub evaluates the model, and which data it uses."""
    codec: CodecSettings = CodecSettings()
    """How payloads are encoded."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """How often the hub writes checkpoints, and which checkpoint it resumes from."""
    liveness: Liveness = Liveness()
    """How long the hub waits for a device's next message before the device's lease expires."""
    limits: Limits = Limits()
    """Limits on the messages, devices and connections that the hub accepts."""
    page: PageSection = PageSection()
    """The page in the browser that shows the fleet. It needs the extra `web`."""
    metrics: MetricsSection = MetricsSection()
    """Metrics for Prometheus. They need the extra `web`."""

    def __post_init__(self) -> None:
        check_day(self.limits, self.liveness)

    def core_settings(self, *, held_out: bool = False, frozen_arrays: Frozen | None = None) -> HubCoreSettings:
        """Return the settings of the hub's core.

        `held_out` states whether the hub has an evaluator; `frozen_arrays` describes the model.
        """
        return HubCoreSettings(
            liveness=self.liveness,
            limits=self.limits,
            stop=self.hub.stop,
            checkpoint=self.checkpoint,
            evaluation=replace(self.evaluation, data=None),  # the core never reads the data
            quiet=self.quiet,
            codec=self.codec,
            frozen=self.hub.frozen,
            held_out=held_out,
            frozen_arrays=frozen_arrays,
        )

    @property
    def fleet_policy(self) -> Policy:
        """The policy. If `trust` is not set, its value depends on who can connect to the hub.

        Raises `ConfigError` if the policy requires trusted devices, but anybody can connect.
        """
        if not isinstance(self.policy, Policy) or self.policy.trust is not None:
            return self.policy
        try:
            return replace(self.policy, trust="open" if self.hub.is_open else "admitted")
        except ValueError as error:
            raise ConfigError(
                f"policy: {error}. This hub admits anybody, so policy.trust is 'open'; change the policy, set "
                "hub.keys, or set policy.trust = 'admitted' if you trust everybody who can connect"
            ) from error

    @property
    def quiet(self) -> bool:
        """Whether the fleet may idle once training has plateaued."""
        if self.hub.quiet is not None:
            return self.hub.quiet
        return self.hub.stop == StopCondition() and isinstance(self.policy.frequency, AdaptiveFrequency)


class HubSettings(RunSettings, frozen=True, kw_only=True):
    """A hub's settings file. Every key except `[model]` has a default."""

    model: Model | OnnxModel | CustomModel
    """The model that the fleet trains: `[model]`. The flag `--model` overrides it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hub.quiet and not isinstance(self.policy.frequency, AdaptiveFrequency):
            raise ValueError(
                "hub.quiet needs policy.frequency.kind = 'adaptive'; set that kind, or remove hub.quiet"
            )
        if self.evaluation.data is not None and self.model.local:
            raise ValueError(
                "the hub cannot evaluate a model whose local parameters (model.local) differ between devices; "
                "remove evaluation.data, and the hub uses the devices' losses"
            )
        if self.evaluation.data is not None and isinstance(self.model, CustomModel):
            raise ValueError(
                "the hub cannot evaluate a model of model.kind = 'custom', which it cannot run; remove "
                "evaluation.data, and the hub uses the devices' losses"
            )
        if self.hub.stop.accuracy is not None and self.evaluation.data is None:
            raise ValueError("hub.stop.accuracy needs held-out data; set evaluation.data")
        if self.hub.stop.accuracy is not None and isinstance(self.model, OnnxModel):
            loss = find_loss(self.model.loss)
            if not isinstance(loss, CrossEntropy):
                raise ValueError(
                    "hub.stop.accuracy can never be reached: only the loss cross_entropy has an accuracy, but "
                    f"model.loss is {kind_of(loss)}; use hub.stop.loss, plateau, minutes or updates"
                )
        if self.policy.aggregate.update == "model" and self.codec.push not in ("auto", *ELEMENTWISE):
            raise ValueError(
                f"codec.push = {self.codec.push!r} is too lossy: under this policy.aggregate devices send whole "
                f"models; set 'auto' or one of {', '.join(ELEMENTWISE)}"
            )
        for path, part in (("policy", self.policy), ("policy.warm_up", self.policy.warm_up)):
            count = None if part is None else getattr(part.aggregate, "count", None)
            if count is not None and count > self.limits.updates_held_max:
                raise ValueError(
                    f"{path}.aggregate.count ({count}) must not exceed limits.updates_held_max "
                    f"({self.limits.updates_held_max}); decrease the count or increase the limit"
                )
