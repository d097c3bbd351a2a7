"""Choose the codec of a device's updates by its link: `push = "auto"`.

The choice depends on the link alone, not on the number of local steps or the load of the machine.
By default a value takes one byte. A coarser codec is for links on which such an upload takes long
compared with some local steps and a round trip, because the upload then limits how often the device
exchanges. More than a byte per value does not improve training, even on a fast link.
"""

from collections.abc import Collection
from typing import NamedTuple


class Rung(NamedTuple):
    """A codec, and its approximate number of bytes per value."""

    codec: str
    bytes_per_value: float


LADDER = (Rung("int8", 1.02), Rung("top_k(0.1)+int8", 0.17))
"""Codecs from fine to coarse; the last one is only for links too slow for the others."""

MODEL_LADDER = (Rung("float16", 2.0),)
"""Codecs for devices that send whole models, which coarser codecs would damage."""

_BYTES_PER_VALUE = {rung.codec: rung.bytes_per_value for rung in LADDER + MODEL_LADDER} | {"bfloat16": 2.0}

UPLOAD_SHARE_MAX = 0.1
"""Longest upload, as a share of the time of `STEPS` local steps and a round trip."""

STEPS = 8
"""Number of local steps to compare an upload with.

It is constant, because a device with longer intervals should not send more bytes.
"""

FAST_BYTES_PER_S = 10e6
"""At this bandwidth, about 100 Mbit/s, encoding takes as long as it saves, so a byte per value is
small enough.
"""

HYSTERESIS = 0.5
"""Factor of `UPLOAD_SHARE_MAX` for codecs finer than the current one, so that choices do not
alternate.
"""

TINY_BYTES = 4096
"""Payloads up to this size are not worth encoding."""


def choose_codec(
    ladder: tuple[Rung, ...],
    current: str,
    *,
    values: int,
    known: Collection[str],
    bandwidth_bytes_per_s: float,
    step_s: float,
    round_trip_s: float = 0.0,
) -> str:
    """Return the codec for the next updates: one of `known`, or `identity`.

    `values` is the length of an update. A bandwidth or step time of 0 means unknown.
    """
    rungs = [rung for rung in ladder if rung.codec in known]
    if 4 * values <= TINY_BYTES or not rungs:
        return "identity"
    if not bandwidth_bytes_per_s or not step_s or bandwidth_bytes_per_s >= FAST_BYTES_PER_S:
        return rungs[0].codec
    finer = True
    for rung in rungs:
        finer = finer and rung.codec != current
        share = rung.bytes_per_value * values / bandwidth_bytes_per_s / (STEPS * step_s + round_trip_s)
        if share <= UPLOAD_SHARE_MAX * (HYSTERESIS if finer else 1.0):
            return rung.codec
    return rungs[-1].codec


def bytes_per_value(codec: str) -> float:
    """Return a codec's approximate bytes per value; for an unknown codec, the maximum."""
    return _BYTES_PER_VALUE.get(codec, 4.0)
