"""Digests of what a device proves itself by: the hub keeps these, on disk and in memory, never the secrets.

Sessions and state ids are 16 random bytes, so nobody finds one by its digest, and no salt is needed: what proves a
device now does so after the hub's restart, too. A digest itself proves nothing.
"""

from hashlib import blake2b
from typing import TypeVar

import msgspec

from edgeasync.protocol.messages import Fetch, FetchGraph, Goodbye, Hello, Message, Ping, Push

_BYTES = 16
_PURPOSE = b"edgeasync-digest"

Said = TypeVar("Said", bound=Message)


def digest(secret: bytes) -> bytes:
    """Return the digest of a session or a state id, which is as long."""
    return blake2b(secret, digest_size=_BYTES, person=_PURPOSE).digest()


def with_digests(message: Said) -> Said:
    """Return a device's message with digests where it says its session and its state id."""
    if not isinstance(message, (Push, Ping, Fetch, Hello, FetchGraph, Goodbye)) or (
        message.session is None and not isinstance(message, Hello)
    ):
        return message
    session = None if message.session is None else digest(message.session)
    if isinstance(message, Hello):
        return msgspec.structs.replace(message, session=session, state_id=digest(message.state_id))
    return msgspec.structs.replace(message, session=session)
