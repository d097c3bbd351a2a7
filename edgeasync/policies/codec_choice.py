"""Chooses the codec of a device's updates for its link: `push = "auto"`.

It takes the finest codec whose upload is short beside the part of a cycle that no codec can shorten: the local
steps and a round trip. When uploads take longer, the size of updates limits how often the device exchanges, and a
coarser codec lets it exchange more often. A link that is not measured yet counts as slow, but not as very slow.
"""

from collections.abc import Collection
from typing import NamedTuple


class Rung(NamedTuple):
    """A codec, and about how many bytes it takes for a value."""

    codec: str
    bytes_per_value: float


LADDER = (Rung("identity", 4.0), Rung("int8", 1.02), Rung("top_k(0.1)+int8", 0.17))
"""From the finest to the smallest; the last one is only for links that are too slow for the others."""

MODEL_LADDER = (Rung("identity", 4.0), Rung("float16", 2.0))
"""For devices that send whole models, which coarser codecs would damage."""

UPLOAD_SHARE_MAX = 0.1
"""Longest upload, as a share of that part of the cycle."""

FAST_BYTES_PER_S = 10e6
"""From this bandwidth on, about 100 Mbit/s, coding takes as long as it saves: one byte a value is small enough."""

HYSTERESIS = 0.5
"""Factor of `UPLOAD_SHARE_MAX` for codecs finer than the current one, so that choices do not alternate."""

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
    """Return the codec of the next updates, one of the `known` codecs; `identity` is always known.

    `values` is the length of an update, `computing_s` the time in which the device takes its local steps.
    A bandwidth or computing time of 0 is unknown.
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
