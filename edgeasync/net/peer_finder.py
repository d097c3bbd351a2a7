"""Find other peers by asking a hub, and store its answers in a peers file."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from edgeasync.core.device.effects import DeviceReport
from edgeasync.durable.peers_file import PeerEntry, Peers, read_peers, write_peers
from edgeasync.errors import AddressError, ProtocolError, StorageError
from edgeasync.net.address import host_of
from edgeasync.net.credentials import Credentials
from edgeasync.net.device_access import DeviceAccess
from edgeasync.net.hub_connection import HubConnection
from edgeasync.net.network import ZmqNetwork
from edgeasync.protocol import wire
from edgeasync.protocol.messages import FindPeers, FoundPeers, Refuse

ASK_S = 1.0
"""Interval at which the hub is asked, because peers may join or change their addresses."""

CONNECT_S = 5.0
"""Timeout of a connection attempt to the hub, and delay before the next attempt."""


class PeerFinder:
    """Asks a hub for the other peers, and writes the list to `file` if it has changed.

    A peer in the hub's answer replaces entries that have the same name, address or key. An answer
    never removes any other entry, because a restarted hub does not know all peers yet. An entry
    that a user has deleted from the file is added again only if the hub still lists the peer.
    `on_trouble` is called with a message. `give_up` is called with an error that cannot be resolved
    by waiting: the keys do not match. Use it on one event loop.
    """

    def __init__(
        self,
        credentials: Credentials,
        network: ZmqNetwork,
        own: PeerEntry,
        peers: Peers,
        file: Path,
        *,
        on_trouble: Callable[[str], None],
        give_up: Callable[[BaseException], None],
    ) -> None:
        self._own, self._peers, self._file = own, peers, file
        self._on_trouble = on_trouble
        self._told = ""
        """The last message that was reported since the hub's last answer."""
        self._hub = HubConnection(
            credentials,
            wire.HEADER_BYTES_MAX,
            on_message=self._on_message,
            on_connected=lambda: None,
            on_disconnected=self._on_disconnected,
            shared=network,
        )
        self._access = DeviceAccess(credentials, self._hub, own.name, self._on_report, give_up)
        self._tries = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Enrol this device at the hub if needed, then start to ask."""
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._next_s = self._loop.time()
        self._hub.begin()
        self._access.begin(self._ask)

    def close(self) -> None:
        """Stop asking."""
        if self._timer is not None:
            self._timer.cancel()
        self._access.cancel()
        self._hub.cancel()
        self._hub.close(goodbye=False, answered=True)

    def _ask(self) -> None:
        """Ask the hub if it is connected; otherwise try its next address after a delay."""
        self._timer = self._loop.call_later(ASK_S, self._ask)
        now_s = self._loop.time()
        if self._hub.finding == "spoken":
            self._next_s = now_s + CONNECT_S
            self._hub.send(wire.encode(FindPeers(self._own.name, self._own.address)), None)
        elif now_s >= self._next_s:
            self._next_s = now_s + CONNECT_S
            if self._hub.finding is None:
                self._hub.connect(self._tries % len(self._hub.addresses))
                self._tries += 1
            else:
                self._hub.close(goodbye=False, answered=False)
                self._hub.explain(DeviceReport("unreachable", since_s=self._heard_s), self._on_report)

    def _on_disconnected(self) -> None:
        self._access.disconnected()

    def _on_report(self, report: DeviceReport) -> None:
        if report.event != "enrolled":
            self._tell(f"cannot ask the hub for other peers: {report.detail}")

    def _tell(self, sentence: str) -> None:
        if not self._told:
            self._on_trouble(sentence)
        self._told = sentence

    def _on_message(self, header: bytes, payload: wire.Buffer | None) -> None:  # noqa: ARG002
        try:
            message = wire.decode(header)
            if isinstance(message, FoundPeers):
                self._take([PeerEntry(each.name, each.address, each.key.hex()) for each in message.peers])
        except wire.UnsupportedVersionError as error:
            message = error.to_refuse()
        except (ProtocolError, AddressError, ValueError) as error:
            self._tell(f"the hub's list of peers is invalid: {error}")
            return
        except StorageError as error:
            self._tell(str(error))
            return
        if isinstance(message, Refuse):
            self._tell(f"the hub refused this peer: {message.sentence}")

    def _take(self, found: list[PeerEntry]) -> None:
        """Write the list if it has changed; raises `ValueError`, `AddressError` or `StorageError`."""
        for entry in found:
            host_of(entry.address)
        if self._own not in found:
            raise ValueError(
                f"{self._own.name} is missing, or has another address or key than this device; correct its entry "
                "at the hub"
            )
        listed = read_peers(self._file) if self._file.exists() else self._peers
        peers = listed.with_found(found)
        self._access.joined()
        if peers != listed:
            write_peers(self._file, peers)
        self._heard_s, self._told = self._loop.time(), ""
