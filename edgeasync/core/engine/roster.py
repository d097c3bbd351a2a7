"""The peers that a hub tells of one another: each has said, under its own key, where the others reach it."""

from edgeasync.core.engine.sender import Sender
from edgeasync.protocol.messages import PEERS_MAX, FindPeers, FoundPeers, Key, ListedPeer, Refuse

PORT_MAX = 65_535


class Roster:
    """Names, addresses and keys of peers, in memory: after a restart of the hub they say them again.

    A name is that of the key in the hub's allow-list, so nobody can say another's.
    """

    def __init__(self) -> None:
        self._peers: dict[str, ListedPeer] = {}

    def answer(self, request: FindPeers, sender: Sender) -> FoundPeers | Refuse:
        """Note where a peer is reached, and return all that are known; or say why it is not noted."""
        name, address = request.name, request.address
        if sender.role != "device":
            return Refuse("not_allowed", "this hub has no keys, by which peers know one another; give it --keys")
        if name != sender.name:
            return Refuse("not_allowed", f"this peer's key is that of {sender.name}, not of {name}")
        if int(address.rpartition(":")[2]) > PORT_MAX:
            return Refuse("malformed", f"address {address}: a port is at most {PORT_MAX}")
        taken = next((each.name for each in self._peers.values() if each.address == address), name)
        if taken != name:
            return Refuse("not_allowed", f"address {address}: {taken} is there already")
        if name not in self._peers and len(self._peers) == PEERS_MAX:
            return Refuse("hub_full", f"there are {PEERS_MAX} peers already; revoke the key of one that is gone")
        self._peers[name] = ListedPeer(name, address, sender.key)
        return FoundPeers(tuple([self._peers[each] for each in sorted(self._peers)]))

    def forget(self, key: Key) -> None:
        """Forget the peer of a key that counts no more."""
        self._peers = {name: each for name, each in self._peers.items() if each.key != key}
