"""The names and addresses of peers that use a hub as their directory."""

from edgeasync.core.engine.sender import Sender
from edgeasync.protocol.messages import PEERS_MAX, FindPeers, FoundPeers, Key, ListedPeer, Refuse

PORT_MAX = 65_535


class Roster:
    """The names, addresses and keys of peers, in memory only.

    After a restart of the hub, the peers register again. A peer's name is the name of its key in
    the hub's allow-list, so a peer cannot use the name of another.
    """

    def __init__(self) -> None:
        self._peers: dict[str, ListedPeer] = {}

    def answer(self, request: FindPeers, sender: Sender) -> FoundPeers | Refuse:
        """Record the address of a peer; return all known peers, or a refusal."""
        name, address = request.name, request.address
        if sender.role != "device":
            return Refuse(
                "not_allowed", "peers need a hub with keys to identify one another; start the hub with --keys"
            )
        if name != sender.name:
            return Refuse("not_allowed", f"this peer's key belongs to {sender.name}, not to {name}")
        if int(address.rpartition(":")[2]) > PORT_MAX:
            return Refuse("malformed", f"address {address}: the port must be at most {PORT_MAX}")
        taken = next((each.name for each in self._peers.values() if each.address == address), name)
        if taken != name:
            return Refuse("not_allowed", f"address {address} is already used by {taken}")
        if name not in self._peers and len(self._peers) == PEERS_MAX:
            return Refuse(
                "hub_full",
                f"the hub already lists {PEERS_MAX} peers, the maximum; revoke the key of an unused one",
            )
        self._peers[name] = ListedPeer(name, address, sender.key)
        return FoundPeers(tuple([self._peers[each] for each in sorted(self._peers)]))

    def forget(self, key: Key) -> None:
        """Drop the peer of a key that is no longer valid."""
        self._peers = {name: each for name, each in self._peers.items() if each.key != key}
