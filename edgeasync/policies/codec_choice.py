"""Choose the codec of a device's updates by the speed of its link: `push = "auto"`.

The choice does not depend on the number of local steps between two exchanges. By default, an
encoded value has one byte. More than one byte per value does not improve training. A coarser codec
is chosen for a slow link, on which an upload takes long compared with the time of `STEPS` local
steps and a round trip. On such a link, the upload limits how often the device can exchange. On a
link that is fast enough for plain values, nothing is encoded (`core/hub/fast_link.py`).
"""

from collections.abc import Collection
from typing import NamedTuple


class Rung(NamedTuple):
    """A codec and its approximate number of bytes per value."""

    codec: str
    bytes_per_value: float


LADDER = (Rung("int8", 1.02), Rung("top_k(0.1)+int8", 0.17))
"""Codecs from fine to coarse. The last one is used only on links that are too slow for the others.
"""

MODEL_LADDER = (Rung("float16", 2.0),)
"""Codecs for devices that send whole models, which coarser codecs would damage."""

FAST = "identity"
"""The codec for links on which encoding costs more than it saves."""

_BYTES_PER_VALUE = {rung.codec: rung.bytes_per_value for rung in LADDER + MODEL_LADDER} | {"bfloat16": 2.0}

UPLOAD_SHARE_MAX = 0.1
"""Maximum upload time, as a share of the time for `STEPS` local steps and a round trip."""

STEPS = 8
"""Number of local steps whose time the upload time is compared with.

It is constant, because a device that takes more local steps between exchanges should not send more
bytes.
"""

FINEST_BYTES_PER_S = 10e6
"""Bandwidth (about 100 Mbit/s) from which the finest codec of the ladder is always used."""

HYSTERESIS = 0.5
"""Factor that lowers `UPLOAD_SHARE_MAX` for codecs finer than the current one, so that the choice
does not alternate between two codecs.
"""

TINY_BYTES = 4096
"""Maximum size of an unencoded payload that is not worth encoding."""


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

    `known` contains the codecs that may be used. `values` is the length of an update. A bandwidth
    or step time of 0 means that it is unknown.
    """
    rungs = [rung for rung in ladder if rung.codec in known]
    if 4 * values <= TINY_BYTES or not rungs:
        return "identity"
    if not bandwidth_bytes_per_s or not step_s or bandwidth_bytes_per_s >= FINEST_BYTES_PER_S:
        return rungs[0].codec
    finer = True
    for rung in rungs:
        finer = finer and rung.codec != current
        share = rung.bytes_per_value * values / bandwidth_bytes_per_s / (STEPS * step_s + round_trip_s)
        if share <= UPLOAD_SHARE_MAX * (HYSTERESIS if finer else 1.0):
            return rung.codec
    return rungs[-1].codec


def bytes_per_value(codec: str) -> float:
    """Return a codec's approximate number of bytes per value, which is 4 for an unknown codec."""
    return _BYTES_PER_VALUE.get(codec, 4.0)
