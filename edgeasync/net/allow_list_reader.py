"""Authorize keys by the allow-list and tokens in a hub's folder. Changed files are read again."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from edgeasync.core.engine.sender import Sender
from edgeasync.durable.allow_list import Allowed, AllowList, Key
from edgeasync.durable.keys import HubKeys, IssuedToken, fingerprint
from edgeasync.errors import StorageError
from edgeasync.host.file_watch import FileWatch, Stamp, stamp_of

LOG = logging.getLogger("edgeasync.keys")

POLL_S = 0.2
"""Interval at which the allow-list is checked.

It ensures that a revocation takes effect within a second.
"""

KNOCK_S = 0.5
"""Minimum time between two recorded connection attempts by unknown keys."""

REVOKED_MAX = 4096
"""Number of keys of earlier lists to remember, so that their connections are counted as revoked."""


class AllowListReader:
    """Authorizes keys by the allow-list. Use it on the hub's event loop.

    `on_revoked` is called with the keys that a change of the list has revoked. `on_trouble` is
    called with a message if the list, or a line of it, is invalid. `on_knock`, if set, is called
    with unknown keys that try to connect and their addresses, at most once every `KNOCK_S` seconds.
    `on_expired` is called when a token is first found to have expired. The caller must record this.
    Otherwise the token would be valid again if the clock were set back. `denied` counts rejections
    by reason.
    """

    def __init__(
        self,
        keys: HubKeys,
        on_revoked: Callable[[set[Key]], None],
        on_trouble: Callable[[str], None],
        *,
        on_knock: Callable[[Key, str], None] | None = None,
        on_expired: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.pair = keys.pair()
        self.denied: Counter[str] = Counter()
        self._keys = keys
        self._on_revoked = on_revoked
        self._on_trouble = on_trouble
        self._now_s = now_s
        self._on_knock = on_knock
        self._on_expired = on_expired
        self._expired: set[Key] = set()
        self._knocked_s = 0.0
        self._revoked: dict[Key, None] = {}
        self._watch = FileWatch(keys.allow_list_file)
        self._let_in: dict[str, Allowed] = {}
        self._senders: dict[str, Sender] = {}
        self._apply(keys.allow_list())
        self._tokens: dict[Key, IssuedToken] = {}
        self._tokens_stamp: Stamp | None = None
        self._timer: asyncio.TimerHandle | None = None

    # -- authorization ---------------------------------------------------------------------------------------

    def lets_in(self, key: Key, address: str) -> bool:
        """Return whether a key may connect. Call it once per connection.

        A rejection is counted and logged.
        """
        user_id = key.hex()
        if user_id not in self._senders:
            self.poll(replaced=True)  # the list may have changed a moment ago
        if user_id in self._senders:
            return True
        token = self.token(user_id)
        if token is not None and not token.used:
            return True
        reason = "revoked" if key in self._revoked else "unknown_key"
        reason = reason if token is None else "token"
        self.denied[reason] += 1
        if reason == "unknown_key" and self._on_knock is not None and self._now_s() >= self._knocked_s + KNOCK_S:
            self._knocked_s = self._now_s()
            self._on_knock(key, address)
        LOG.info("rejected a connection: %s, key %s from %s", reason, fingerprint(key), address)
        return False

    def sender(self, user_id: str) -> Sender | None:
        """Return the sender that a key identifies, or `None` if the key is not admitted."""
        return self._senders.get(user_id)

    def token(self, user_id: str) -> IssuedToken | None:
        """Return the token to which a temporary key belongs, or `None` if no token is known for it."""
        self._look_at_tokens()
        token = self._tokens.get(bytes.fromhex(user_id))
        if token is not None and token.key in self._expired:
            token = msgspec.structs.replace(token, used=True)
        return token

    def _look_at_tokens(self) -> None:
        """Read the tokens again if they have changed, and find expired tokens."""
        stamp = stamp_of(self._keys.tokens_file)
        if stamp != self._tokens_stamp:
            try:
                self._tokens = {token.key: token for token in self._keys.tokens()}
                self._tokens_stamp = stamp
            except StorageError as error:
                self._on_trouble(str(error))
        now_s = self._now_s()
        expired = {key for key, token in self._tokens.items() if not token.used and token.until_s < now_s}
        if not expired <= self._expired:
            self._expired |= expired
            self._on_expired()

    # -- changes of the list ----------------------------------------------------------------------------------

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check the list every `POLL_S` seconds, until `close`."""
        self._timer = loop.call_later(
            POLL_S, self.watch, loop
        )  # scheduled first, so that an error does not end the watch
        self.poll()
        self._look_at_tokens()

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()

    def poll(self, *, replaced: bool = False) -> None:
        """Read the list again if it has changed or, with `replaced`, only if the file was replaced."""
        if self._watch.has_changed(replaced=replaced):
            self.read()

    def read(self) -> None:
        """Read the list again now. Call it only if the file is known to be complete."""
        self._watch.note_read()
        try:
            allowed = self._keys.read_allow_list()
        except StorageError as error:
            self._on_trouble(f"{error}; the previous allow-list stays in force until then")
            return
        self._apply(allowed)
        if allowed.unreadable:
            self._on_trouble(
                f"{self._keys.allow_list_file}: {allowed.trouble}; correct these lines; until then the hub admits "
                "no new keys, but revokes removed ones, and the names in these lines keep their keys"
            )

    def _apply(self, allowed: AllowList) -> None:
        before = set(self._senders.values())
        self._let_in = allowed.lets_in(self._let_in)
        self._senders = {
            entry.key.hex(): Sender(entry.key, entry.name, entry.role)
            for entry in self._let_in.values()
            if entry.role != "revoked"
        }
        self.device_names = frozenset(one.name for one in self._senders.values() if one.role == "device")
        # A key with a new name or role loses its sessions under the old one.
        gone = {sender.key for sender in before - set(self._senders.values())}
        marked = {entry.key for entry in allowed.entries.values() if entry.role == "revoked"}
        for key in gone | marked:
            if not self.holds(key):
                self._revoked[key] = None
        for key in [*self._revoked][: max(0, len(self._revoked) - REVOKED_MAX)]:
            del self._revoked[key]
        if gone:
            self._on_revoked(gone)

    def holds(self, key: Key) -> bool:
        """Return whether the list contains a key and the key is not revoked."""
        return key.hex() in self._senders

    def gives(self, key: Key, device_id: str) -> bool:
        """Return whether the list allows a key to use a device id."""
        sender = self.sender(key.hex())
        return sender is not None and sender.speaks_for(device_id)
