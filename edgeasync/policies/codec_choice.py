"""Chooses the codec of a device's updates for its link: `push = "auto"`.

The choice depends on the link alone: neither on how many local steps the device takes, nor on how busy its machine
is. An update costs a byte a value. A coarser codec is for links on which such an upload takes long beside a few
local steps and a round trip: there the size of updates limits how often the device exchanges. More than a byte a
value buys nothing, whatever the link has to spare.
"""

from collections.abc import Collection
from typing import NamedTuple


class Rung(NamedTuple):
    """A codec, and about how many bytes it takes for a value."""

    codec: str
    bytes_per_value: float


LADDER = (Rung("int8", 1.02), Rung("top_k(0.1)+int8", 0.17))
"""The finer one first; the last one is only for links that are too slow for the others."""

MODEL_LADDER = (Rung("float16", 2.0),)
"""For devices that send whole models, which coarser codecs would damage."""

_BYTES_PER_VALUE = {rung.codec: rung.bytes_per_value for rung in LADDER + MODEL_LADDER} | {"bfloat16": 2.0}

UPLOAD_SHARE_MAX = 0.1
"""Longest upload, as a share of the time of `STEPS` local steps and a round trip."""

STEPS = 8
"""Local steps that an upload is compared with, however many the device takes: a longer period is no reason to send
more bytes."""

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
    step_s: float,
    round_trip_s: float = 0.0,
) -> str:
    """Return the codec of the next updates: one of the `known` codecs, or `identity`, which is always known.

    `values` is the length of an update. A bandwidth or a step's time of 0 is unknown.
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
    """Return about how many bytes a codec takes for a value; of one that is not known here, the most."""
    return _BYTES_PER_VALUE.get(codec, 4.0)
