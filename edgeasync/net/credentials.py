"""Under which keys a device speaks to which hub."""

from typing import NamedTuple

from edgeasync.durable.allow_list import read_key
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.keys import Token
from edgeasync.errors import ConfigError
from edgeasync.net.address import check_connect
from edgeasync.net.dealer import Pair


class Credentials(NamedTuple):
    """A hub's addresses, and for a device with keys its pair and the hub's key; a `token` is still to be used.

    With `knocking` the device waits until a person at the hub accepts its key.
    """

    addresses: tuple[str, ...]
    keys: DeviceKeys | None = None
    pair: Pair | None = None
    token: Token | None = None
    knocking: bool = False


def find_credentials(
    addresses: tuple[str, ...], keys: DeviceKeys | None, enrol: str | None, *, knocking: bool, insecure: bool
) -> Credentials:
    """Return a device's credentials, with the addresses as given, or else as the token or the keys have them.

    Raises `ConfigError`, `StorageError` and, unless `insecure`, `AddressError` for a hub beyond this machine that
    the device has no keys for.
    """
    if keys is None:
        if enrol is not None:
            raise ConfigError("enrol needs keys, a place for the device's own key")
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
        raise ConfigError("which hub? give at least one address, tcp://HOST:PORT")
    for address in found.addresses:
        check_connect(address, insecure=insecure or keys is not None)
    return found
