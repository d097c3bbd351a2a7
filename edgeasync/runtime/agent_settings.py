"""Define an agent's settings file as frozen structs.

`docs/reference/settings/index.md` lists every key. The module is separate so that a device does not
import the hub's modules.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from edgeasync.config import FilePath, Section, convert
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.device.throttle import ThrottleSection
from edgeasync.plugins import check_name
from edgeasync.runtime.device_settings import DeviceSection
from edgeasync.runtime.peer_settings import PeerSection
from edgeasync.training.local_parameters import Patterns
from edgeasync.training.micro_batches import MicroBatch
from edgeasync.training.numpy_models import Model

OF_A_PEER = "a device without a hub is a peer; use edgeasync.Peer, or 'edgeasync peer' with a peer's settings file"


class AgentSection(DeviceSection, frozen=True):
    """`[agent]`: the device's hub, its data and its identity."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(PeerSection.__struct_fields__, OF_A_PEER),
        **dict.fromkeys(
            ("output", "train", "freeze", "recompute", "lora", "base"),
            f"the hub's settings define it with the model; {OF_A_PEER}",
        ),
        **dict.fromkeys(DeviceLimits.__struct_fields__, "it is a key of [limits]"),
    }

    GROUPS: ClassVar[Mapping[str, str]] = {
        **DeviceSection.GROUPS,
        "trainer": "Training",
        "base_cache": "Training",
        "spool": "Identity",
        "local": "Training",
        "hub_key": "Connection",
        "when_finished": "Training",
    }

    trainer: str | None = None
    """Your own trainer as `package.module:factory`. The factory is called with the hub's `Welcome`
    and the data, or with `None` if `data` is not set. The agent imports it from packages that are
    installed on this machine, never from the hub: [Your own code on daemons](/train/own_code.md).
    """
    micro_batch_size: MicroBatch | None = None
    """Maximum number of examples that the model processes at once, or `auto`. It overrides the
    hub's value. It does not change the result of a step: [Large batches on small
    devices](/train/optimizer.md#large-batches-on-small-devices).
    """
    base_cache: FilePath = FilePath("~/.cache/edgeasync/bases")
    """Folder of the frozen values that this device has downloaded from hubs. All agents of a user
    may share it: [The base of a model](/devices/network.md#the-base-of-a-model).
    """
    spool: Literal["identity", "full"] = "identity"
    """What survives a power cut. `identity` stores only the device's identity. `full` also stores
    the unanswered update, the trainer's state and the model: [What a device
    keeps](/reference/settings/agent.md#agent).
    """
    local: Patterns = ()
    """Patterns of arrays whose values stay on this device, such as `head.*`. The hub may add
    further patterns: [Local parameters](/train/local.md).
    """
    hub_key: str | None = None
    """The hub's public key (64 hexadecimal digits), to request admission without a token. The
    device waits until the hub's operator accepts its key:
    [Keys](/operate/keys.md#or-let-a-device-knock).
    """
    insecure: bool = False
    """Connect to a hub on another machine without keys. Anybody on the network path could then read
    and change the messages. If it is `false`, the agent ends with exit code 8 for such an address,
    or for a name that does not resolve. See the key `insecure` of `[hub]` for the addresses that count
    as this machine.
    """
    when_finished: Literal["exit", "wait"] = "exit"
    """What the agent does when training ends: exit with code 0 (`exit`), or wait for the hub's next
    run (`wait`). The [service](/devices/service.md) waits.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trainer is not None:
            check_name(self.trainer, "trainer")


class AgentSettings(Section, frozen=True):
    """An agent's settings file."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("peer", "peers"), OF_A_PEER),
        "local": f"the hub's settings file defines how devices train; {OF_A_PEER}",
    }

    agent: AgentSection = AgentSection()
    """The device's hub, data and identity."""
    limits: DeviceLimits = DeviceLimits()
    """Limits on what the device does, accepts and sends."""
    throttle: ThrottleSection = ThrottleSection()
    """When the device pauses training, and how fast it trains."""
    model: Model | None = None
    """The only model that the agent accepts, with the same keys as in a hub's file. Its kind is
    `softmax` or `mlp`. If the hub's model has different arrays, the agent ends with exit code 5.
    Without this table, the agent accepts any model from the hub.
    """

    @classmethod
    def of_keys(cls, given: Mapping[str, object], *, where: str) -> Self:
        """Return settings from a single mapping that contains keys of both `[agent]` and `[limits]`.

        Raises `ConfigError`.
        """
        limits = {key: value for key, value in given.items() if key in DeviceLimits.__struct_fields__}
        agent = {key: value for key, value in given.items() if key not in limits}
        return cls(
            agent=convert(agent, AgentSection, where=where), limits=convert(limits, DeviceLimits, where=where)
        )

    def __post_init__(self) -> None:
        if self.model is not None and self.model.local:
            raise ValueError("model.local is a key of a hub's settings file; on a device, set local in [agent]")
