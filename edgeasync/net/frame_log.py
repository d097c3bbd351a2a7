"""Log every message at level debug with the logger `edgeasync.frames`."""

import logging

from edgeasync.core.engine.recorder import shown
from edgeasync.errors import ProtocolError
from edgeasync.protocol import wire

FRAMES = logging.getLogger("edgeasync.frames")


def log_frame(way: str, peer: bytes, header: bytes, payload: wire.Buffer | None) -> None:
    """Log a message without secrets. `way` is `in` for a received message and `out` for a sent one."""
    if not FRAMES.isEnabledFor(logging.DEBUG):
        return
    try:
        what = shown(wire.decode(header))
    except ProtocolError as error:
        what = f"unreadable: {error}"
    nbytes = 0 if payload is None else len(payload)
    FRAMES.debug("%s %s %s, payload of %d bytes", way, peer.hex() or "-", what, nbytes)
