"""Digests of sessions and state ids, which the hub stores instead of the secrets.

A session or state id consists of 16 random bytes. It cannot be guessed from its digest, so no salt
is needed, and secrets stay valid across restarts of the hub. Knowing a digest does not prove an
identity.
"""

from hashlib import blake2b
from typing import TypeVar

import msgspec

from edgeasync.protocol.messages import Fetch, FetchGraph, Goodbye, Hello, Message, Ping, Push

_BYTES = 16
_PURPOSE = b"edgeasync-digest"

Said = TypeVar("Said", bound=Message)


def digest(secret: bytes) -> bytes:
    """Return the 16-byte digest of a session or a state id."""
    return blake2b(secret, digest_size=_BYTES, person=_PURPOSE).digest()


def with_digests(message: Said) -> Said:
    """Replace the session and the state id in a device's message by their digests.

    The clock in a ping is dropped, because no decision depends on it.
    """
    if not isinstance(message, (Push, Ping, Fetch, Hello, FetchGraph, Goodbye)) or (
        message.session is None and not isinstance(message, Hello)
    ):
        return message
    session = None if message.session is None else digest(message.session)
    if isinstance(message, Hello):
        return msgspec.structs.replace(message, session=session, state_id=digest(message.state_id))
    if isinstance(message, Ping):
        return msgspec.structs.replace(message, session=session, clock_s=None)
    return msgspec.structs.replace(message, session=session)
