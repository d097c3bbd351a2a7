"""Settings of a peer's core: times, limits, and the format of models."""

import msgspec

from edgeasync.protocol.messages import Frozen, OtherFrozen
from edgeasync.protocol.peer_messages import Topology


class PeerCoreSettings(msgspec.Struct, frozen=True, gc=False):
    """The settings of a peer's core.

    - `lease_s`: maximum time without a message from a peer, or without progress in a step of a
      round.
    - `ping_s`: time between pings, and approximate time before unanswered messages are repeated.
    - `piece_bytes`: size of a piece. The slowest link must be able to transfer a piece in half of
      a lease.
    - `round_every_s`: time between rounds. If `round_steps` is set, a round is due after this
      number of local steps instead, as reported by `RoundHalfDue` and `RoundDue`. All peers must
      use the same interval.
    - `codec`: codec of the rounds that this peer proposes. `codecs`: all supported codecs.
    - `payload_bytes_max`: maximum size of an encoded model.
    - `window_bytes`: maximum number of bytes of a payload in flight.
    - `begins_ready`: if not set, the peer joins no round before `TrainingBegun`.
    - `frozen`: what to do with a peer whose frozen arrays differ from this device's
      `frozen_arrays`.
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
        """The interval between two rounds, formatted as a setting."""
        return interval_of(self.round_every_s, self.round_steps)


def interval_of(round_every_s: float, round_steps: int | None) -> str:
    """Format the interval between two rounds as a setting."""
    return f"round_every_s = {round_every_s}" if round_steps is None else f"round_steps = {round_steps}"
