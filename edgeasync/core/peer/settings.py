"""What a peer's core is told once: times, bounds, and how models travel."""

import msgspec

from edgeasync.protocol.messages import Frozen, OtherFrozen
from edgeasync.protocol.peer_messages import Topology


class PeerCoreSettings(msgspec.Struct, frozen=True, gc=False):
    """The settings of a peer's core.

    `lease_s` is how long a peer, or a step of a round, may be silent. Pings go every `ping_s`, and what was not
    answered is repeated about as often. A piece of `piece_bytes` must cross the slowest link in half a lease.

    A round is due `round_every_s` after the last one. With `round_steps` it is due after that number of local
    steps instead: `RoundHalfDue` and `RoundDue` report them. All peers must agree on the interval. `codec` is used
    in own rounds, all `codecs` are known. `payload_bytes_max` bounds a whole coded model. Not more than
    `window_bytes` of a payload are in flight. Unless a peer `begins_ready`, it is in no round before
    `TrainingBegun`.

    `frozen` says what happens to a peer whose frozen arrays differ from `frozen_arrays`, those of this device.
    """

    topology: Topology = "ring"
    fingerprint: str = ""
    lease_s: float = 10.0
    ping_s: float = 2.0
    round_every_s: float = 1.0
    round_steps: int | None = None
    codec: str = "identity"
    codecs: tuple[str, ...] = ("identity",)
    payload_bytes_max: int = 1 << 30
    piece_bytes: int = 1 << 16
    window_bytes: int = 1 << 19
    begins_ready: bool = True
    frozen: OtherFrozen = "refuse"
    frozen_arrays: Frozen | None = None

    @property
    def interval_s(self) -> float | None:
        """The time between two rounds; `None` if steps are counted instead."""
        return self.round_every_s if self.round_steps is None else None

    @property
    def interval(self) -> str:
        """The interval between two rounds as the settings name it."""
        return interval_of(self.round_every_s, self.round_steps)


def interval_of(round_every_s: float, round_steps: int | None) -> str:
    """Return the interval between two rounds as the settings name it."""
    return f"round_every_s = {round_every_s}" if round_steps is None else f"round_steps = {round_steps}"
