"""How a peer finds the others: it asks a hub while that lives, and keeps what it hears in a file of peers."""

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
"""How often the hub is asked: others may have come, or are reached elsewhere by now."""

CONNECT_S = 5.0
"""How long a connection may take to come about, and how long it is left be if it does not."""


class PeerFinder:
    """Asks a hub who the others are, and writes a list that has changed into `file`. Used on one loop.

    What a hub says of a name, an address or a key replaces what the list says of it. It takes nobody out of the
    list: a hub that has started again does not know yet who is there. It is the list as it is in the file: who was
    deleted there stays out. `on_trouble` is called with a sentence,
    `give_up` with an error that waiting would not cure: the keys do not fit.
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
        """What people were told last, unless the hub has answered since."""
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
        """Ask from now on, once this device's key is at the hub."""
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._next_s = self._loop.time()
        self._hub.begin()
        self._access.begin(self._ask)

    def close(self) -> None:
        """Ask no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._access.cancel()
        self._hub.cancel()
        self._hub.close(goodbye=False, answered=True)

    def _ask(self) -> None:
        """Ask if there is a connection, else try the hub's next address now and then."""
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
            self._tell(f"the hub, which finds peers for this one: {report.detail}")

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
            self._tell(f"the hub's list of peers cannot be used: {error}")
            return
        except StorageError as error:
            self._tell(str(error))
            return
        if isinstance(message, Refuse):
            self._tell(f"the hub refuses this peer: {message.sentence}")

    def _take(self, found: list[PeerEntry]) -> None:
        """Write the list if there is something new; raises `ValueError`, `AddressError` or `StorageError`."""
        for entry in found:
            host_of(entry.address)
        if self._own not in found:
            raise ValueError(f"this device, {self._own.name}, stands there otherwise or not at all")
        listed = read_peers(self._file) if self._file.exists() else self._peers
        peers = listed.with_found(found)
        self._access.joined()
        if peers != listed:
            write_peers(self._file, peers)
        self._heard_s, self._told = self._loop.time(), ""
