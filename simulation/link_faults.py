"""What a bad link does to messages: it loses, repeats, delays, reorders and spoils them."""

import math
from random import Random

import msgspec

from edgeasync.errors import ProtocolError
from edgeasync.protocol import wire

Frames = tuple[bytes, bytes | None]
"""A message as it travels: header and payload."""


class LinkFaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """Chances, from 0 to 1, for each message in one direction.

    `late` messages take up to `late_s` longer, so that others overtake them. Of `corrupt` ones some bits are
    flipped, or the end is cut off, in the header or in the payload. With `held_until_s` a message that would be
    lost comes at that time instead, as it does where a transport repeats what was lost.
    """

    lost: float = 0.0
    repeated: float = 0.0
    late: float = 0.0
    late_s: float = 0.0
    corrupt: float = 0.0
    held_until_s: float | None = None

    def beside(self, other: "LinkFaults") -> "LinkFaults":
        """Return what both do together: of each kind the worse."""
        held = [trouble.held_until_s for trouble in (self, other) if trouble.lost]
        return LinkFaults(
            lost=max(self.lost, other.lost),
            repeated=max(self.repeated, other.repeated),
            late=max(self.late, other.late),
            late_s=max(self.late_s, other.late_s),
            corrupt=max(self.corrupt, other.corrupt),
            held_until_s=None if None in held else max([time_s for time_s in held if time_s], default=None),
        )

    def meet(
        self, header: bytes, payload: bytes | None, random: Random, now_s: float
    ) -> list[tuple[float, bytes, bytes | None]]:
        """Return what arrives of a message, and how much later each copy does than it would."""
        if random.random() < self.lost:
            if self.held_until_s is None:
                return []
            return [(max(0.0, self.held_until_s - now_s), header, payload)]
        copies = 2 if random.random() < self.repeated else 1
        arriving = []
        for _ in range(copies):
            delay_s = random.uniform(0.0, self.late_s) if random.random() < self.late else 0.0
            frames: Frames | None = (header, payload)
            if random.random() < self.corrupt:
                frames = corrupted(header, payload, random)
            if frames is not None:
                arriving.append((delay_s, *frames))
        return arriving


SILENCE = LinkFaults(lost=1.0)
"""Nothing gets through."""


def corrupted(header: bytes, payload: bytes | None, random: Random) -> Frames | None:
    """Return the message with a few bits wrong, or cut short; `None` if what came out would be a lie.

    A header that still reads as a message, but as another one or of another version of the protocol, is not what a
    link does: transports have checksums, and against forgers there are keys. A payload has a checksum of its own,
    and may be anything.
    """
    if payload and random.random() < 0.75:
        return header, _spoilt(payload, random)
    header = _spoilt(header, random)
    try:
        wire.decode(header)
    except wire.UnsupportedVersionError:
        return None
    except ProtocolError:
        return header, payload
    return None


def _spoilt(frame: bytes, random: Random) -> bytes:
    if random.random() < 1 / 3:
        return frame[: random.randrange(len(frame))]
    spoilt = bytearray(frame)
    for _ in range(random.randint(1, 8)):
        spoilt[random.randrange(len(frame))] ^= 1 << random.randrange(8)
    # Bits may have been flipped back; then one more is.
    if spoilt == frame:
        spoilt[math.floor(random.random() * len(frame))] ^= 1
    return bytes(spoilt)
