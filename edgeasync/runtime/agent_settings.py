"""An agent's settings file as frozen structs. `docs/reference/settings/index.md` lists every key.

Apart from a hub's, so that a device loads nothing of a hub.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from edgeasync.config import Section, convert
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.device.throttle import ThrottleSection
from edgeasync.plugins import check_name
from edgeasync.runtime.device_settings import DeviceSection
from edgeasync.runtime.peer_settings import PeerSection
from edgeasync.training.local_parameters import Patterns
from edgeasync.training.micro_batches import MicroBatch
from edgeasync.training.numpy_models import Model

OF_A_PEER = "a device without a hub is a peer: use edgeasync.Peer, or 'edgeasync peer' and a peer's settings file"


class AgentSection(DeviceSection, frozen=True):
    """`[agent]`: which hub, which data, and who this device is."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(PeerSection.__struct_fields__, OF_A_PEER),
        **dict.fromkeys(("output", "train", "freeze"), f"the hub says it, with the model; {OF_A_PEER}"),
        **dict.fromkeys(DeviceLimits.__struct_fields__, "it is a key of [limits]"),
    }

    GROUPS: ClassVar[Mapping[str, str]] = {
        **DeviceSection.GROUPS,
        "trainer": "Training",
        "spool": "Identity",
        "local": "Training",
        "hub_key": "Connection",
        "when_finished": "Training",
    }

    trainer: str | None = None
    """A trainer of your own, `package.module:factory`. The factory is called with the hub's `Welcome` and the
    data, `None` without `data`. It is imported from this machine's installation, never from the hub: [Your own
    code on daemons](/train/own_code.md).
    """
    micro_batch_size: MicroBatch | None = None
    """Most examples that go through the model at once, or `auto`; instead of the hub's. The result of a step stays
    the same: [Large batches on small devices](/train/optimizer.md#large-batches-on-small-devices).
    """
    spool: Literal["identity", "full"] = "identity"
    """What the device keeps over a power cut: who it is (`identity`), or also its unanswered update (`full`).
    `full` keeps the trainer's state and the model, too: [What a device keeps](/reference/settings/agent.md#agent).
    """
    local: Patterns = ()
    """Arrays that stay on this device, a pattern such as `head.*`. The hub may name others: [Local
    parameters](/train/local.md).
    """
    hub_key: str | None = None
    """The hub's public key, to ask for admission without a token: 64 hexadecimal digits. The device waits until a
    person at the hub accepts its key: [Keys](/operate/keys.md#or-let-a-device-knock).
    """
    insecure: bool = False
    """Speak to a hub beyond this machine without keys. Anybody on the way could read and change the messages.
    Without it the agent refuses such an address, and a name that does not resolve, with exit code 8. `insecure` of
    `[hub]` says which addresses count as this machine.
    """
    when_finished: Literal["exit", "wait"] = "exit"
    """What to do after the end of training: end with exit code 0, or wait for the hub's next run. The
    [service](/devices/service.md) waits.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trainer is not None:
            check_name(self.trainer, "trainer")


class AgentSettings(Section, frozen=True):
    """An agent's settings file; with `[model]` it insists on that model."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("peer", "peers"), OF_A_PEER),
        "local": f"the hub's file says how devices train; {OF_A_PEER}",
    }

    agent: AgentSection = AgentSection()
    """Which hub, which data, which device."""
    limits: DeviceLimits = DeviceLimits()
    """The most that the device does, accepts and sends."""
    throttle: ThrottleSection = ThrottleSection()
    """When the device pauses, and how fast it trains."""
    model: Model | None = None
    """As in a hub's file, of the kind `softmax` or `mlp`. The agent insists on that model: if the hub's model has
    other arrays, the agent ends with exit code 5. Without it, the agent trains any model that the hub has.
    """

    @classmethod
    def of_keys(cls, given: Mapping[str, object], *, where: str) -> Self:
        """Return settings by keys of `[agent]` and `[limits]` in one mapping; raises `ConfigError`."""
        limits = {key: value for key, value in given.items() if key in DeviceLimits.__struct_fields__}
        agent = {key: value for key, value in given.items() if key not in limits}
        return cls(
            agent=convert(agent, AgentSection, where=where), limits=convert(limits, DeviceLimits, where=where)
        )

    def __post_init__(self) -> None:
        if self.model is not None and self.model.local:
            raise ValueError("model.local is a hub's key; on a device [agent] local keeps arrays to itself")
