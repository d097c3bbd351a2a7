"""Which codec a device's updates travel by, chosen for its link: `push = "auto"`.

The finest codec whose upload takes little of the time between two exchanges that no codec shortens: that of the
local steps, and of a message there and back. Where updates travel longer than that, how often the device speaks
depends on their size, and a coarser codec lets it speak more often. A link that was not measured yet is taken for
a slow one, but not for a very slow one.
"""

from collections.abc import Collection
from typing import NamedTuple


class Rung(NamedTuple):
    """A codec, and about how many bytes a value takes by it."""

    codec: str
    bytes_per_value: float


LADDER = (Rung("identity", 4.0), Rung("int8", 1.02), Rung("top_k(0.1)+int8", 0.17))
"""From the finest to the smallest; the last is only for links on which the others would not do."""

MODEL_LADDER = (Rung("identity", 4.0), Rung("float16", 2.0))
"""For devices that send whole models: nothing coarser keeps them."""

UPLOAD_SHARE_MAX = 0.1
"""Upload time over that time that is little."""

FAST_BYTES_PER_S = 10e6
"""From here on, some 100 Mbit/s, coding takes about as long as it saves: a byte a value is coarse enough."""

HYSTERESIS = 0.5
"""To go back to a finer codec, it must take no more than so much of that."""

TINY_BYTES = 4096
"""A payload of this size is hardly more than its headers."""


def choose_codec(
    ladder: tuple[Rung, ...],
    current: str,
    *,
    values: int,
    known: Collection[str],
    bandwidth_bytes_per_s: float,
    computing_s: float,
    round_trip_s: float = 0.0,
) -> str:
    """Return the codec to use from now on, one of the `known`; `identity` always is.

    `values` is the length of an update, `computing_s` the time in which the device takes its local steps.
    A bandwidth or a computing time of 0 is not known.
    """
    rungs = [rung for rung in ladder if rung.codec in known or rung.codec == "identity"]
    if 4 * values <= TINY_BYTES:
        return "identity"
    if not bandwidth_bytes_per_s or not computing_s:
        return rungs[min(1, len(rungs) - 1)].codec
    if bandwidth_bytes_per_s >= FAST_BYTES_PER_S:
        rungs = [rung for rung in rungs if rung.bytes_per_value >= 1.0]
    finer = True
    for rung in rungs:
        finer = finer and rung.codec != current
        share = rung.bytes_per_value * values / bandwidth_bytes_per_s / (computing_s + round_trip_s)
        if share <= UPLOAD_SHARE_MAX * (HYSTERESIS if finer else 1.0):
            return rung.codec
    return rungs[-1].codec
