"""Find a device's credentials: the addresses of its hub, and its keys."""

from typing import NamedTuple

from edgeasync.durable.allow_list import read_key
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.keys import Token
from edgeasync.errors import ConfigError
from edgeasync.net.address import check_connect
from edgeasync.net.dealer import Pair


class Credentials(NamedTuple):
    """A device's credentials: the hub's addresses, the keys, and a token that was not used yet.

    `pair` is the device's key pair. A device without keys has only addresses. If `knocking`, the
    device waits until a user at the hub accepts its key.
    """

    addresses: tuple[str, ...]
    keys: DeviceKeys | None = None
    pair: Pair | None = None
    token: Token | None = None
    knocking: bool = False


def find_credentials(
    addresses: tuple[str, ...], keys: DeviceKeys | None, enrol: str | None, *, knocking: bool, insecure: bool
) -> Credentials:
    """Return a device's credentials.

    The default addresses are those in the token or in the stored keys. Raises `ConfigError` and
    `StorageError`. Raises `AddressError` if the device has no keys for a hub on another machine,
    unless `insecure` is true.
    """
    if keys is None:
        if enrol is not None:
            raise ConfigError("enrol needs a folder for the device's own key; set state")
        found = Credentials(addresses)
    else:
        own = keys.own()
        token = None if enrol is None else Token.read(enrol)
        if token is None or keys.knows_hub(token):
            record = keys.hub()
            found = Credentials(addresses or record.addresses, keys, (own, read_key(record.key)), None, knocking)
        else:
            found = Credentials(addresses or token.addresses, keys, (own, token.hub), token, knocking)
    if not found.addresses:
        raise ConfigError("no hub is set; pass at least one address, tcp://HOST:PORT")
    for address in found.addresses:
        check_connect(address, insecure=insecure or keys is not None)
    return found
