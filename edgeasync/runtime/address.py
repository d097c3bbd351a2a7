"""Addresses of hubs: `tcp://HOST:PORT`, `ipc://PATH`, or `inproc://NAME` within one process."""

from edgeasync.errors import AddressError


def check_bind(address: str, *, insecure: bool) -> None:
    """Raise `AddressError` unless the address can be bound without keys: loopback only, or told `insecure`."""
    host = _read(address, any_port=True)
    loopback = host is None or host in ("localhost", "[::1]") or host.startswith("127.")
    if not loopback and not insecure:
        raise AddressError(
            f"{address}: anybody on that network could join; bind to 127.0.0.1, or say --insecure if you trust it"
        )


def check_connect(address: str) -> None:
    """Raise `AddressError` unless the address names a place to connect to."""
    host_of(address)


def host_of(address: str) -> str | None:
    """Return the host of an address to connect to, `None` if it is not a TCP address; raises `AddressError`."""
    return _read(address, any_port=False)


def _read(address: str, *, any_port: bool) -> str | None:
    """Return the host of a TCP address, `None` for the other transports."""
    transport, _, place = address.partition("://")
    if transport in ("ipc", "inproc") and place:
        return None
    host, _, port = place.rpartition(":")
    # libzmq would cut a larger number to its last 16 bits, and take another port without a word.
    valid = (port.isdecimal() and 0 < int(port) <= 65_535) or (any_port and port == "*")
    if transport != "tcp" or not host or not valid:
        raise AddressError(f"{address!r} is not an address; write tcp://HOST:PORT, such as tcp://127.0.0.1:5555")
    return host
