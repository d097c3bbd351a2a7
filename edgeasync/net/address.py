"""Addresses of hubs: `tcp://HOST:PORT`, `ipc://PATH`, or `inproc://NAME` within one process."""

import ipaddress
import socket

from edgeasync.errors import AddressError

DEFAULT_ADDRESS = "tcp://127.0.0.1:5555"
"""Where a hub listens and is looked for, if nothing else is said."""

BIND, HUB = "bind (--bind)", "hub (--hub)"
"""The arguments, and flags, that addresses are given by."""


def check_bind(address: str, *, insecure: bool) -> None:
    """Raise `AddressError` unless the address can be bound without keys: loopback only, or told `insecure`."""
    host = _read(address, BIND, any_port=True)
    if not insecure and not _is_loopback(address, host):
        raise AddressError(
            f"{address}: anybody on that network could join; give the hub keys ('edgeasync keys init', then "
            "--keys), bind to 127.0.0.1, or say insecure=True (--insecure) if you trust it"
        )


def is_within_machine(address: str) -> bool:
    """Return whether an address to bind is TCP on loopback: no other machine reaches it, and it names no file.

    No name is resolved but localhost: it could be another machine's a moment later. Raises `AddressError` for what
    is not an address.
    """
    host = (_read(address, BIND, any_port=True) or "").strip("[]")
    try:
        return host == "localhost" or _names_loopback(host)
    except ValueError:
        return False


def check_connect(address: str, *, insecure: bool, name: str = HUB) -> None:
    """Raise `AddressError` unless the address can be spoken to without keys: loopback only, or told `insecure`.

    `name` is what the address was given by.
    """
    host = host_of(address, name)
    if not insecure and not _is_loopback(address, host):
        raise AddressError(
            f"{address}: is beyond this machine, where anybody on the way could read and change what is sent; "
            "enrol this device ('edgeasync keys enrol NAME' at the hub, then --enrol TOKEN), or say insecure=True "
            "(--insecure) if you trust that network"
        )


def host_of(address: str, name: str = "") -> str | None:
    """Return the host of an address to connect to, `None` if it is not a TCP address; raises `AddressError`."""
    return _read(address, name, any_port=False)


def is_ipv6(address: str) -> bool:
    """Return whether an address is one of IPv6: in brackets, or a name that has no address of IPv4.

    A name may have both while its hub listens on one of them, which was IPv4 at all times. May block for as long
    as names take to be resolved.
    """
    if "[" in address:
        return True
    host = _read(address, "", any_port=True)
    return host is not None and not _has(host, socket.AF_INET) and _has(host, socket.AF_INET6)


def _has(host: str, family: int) -> bool:
    """Return whether a name has an address of a family."""
    try:
        return bool(socket.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return False


def _read(address: str, name: str, *, any_port: bool) -> str | None:
    """Return the host of a TCP address, `None` for the other transports; `name` is what it was given by."""
    transport, _, place = address.partition("://")
    if transport in ("ipc", "inproc") and place:
        return None
    host, _, port = place.rpartition(":")
    # libzmq would cut a larger number to its last 16 bits, and take another port without a word.
    valid = (port.isdecimal() and 0 < int(port) <= 65_535) or (any_port and port == "*")
    # In the file of a hub's keys white space ends an address.
    if transport != "tcp" or not host or any(map(str.isspace, host)) or not valid:
        where = f"{name}: " if name else ""
        raise AddressError(
            f"{where}{address!r} is not an address; write tcp://HOST:PORT, such as tcp://127.0.0.1:5555"
        )
    return host


def _is_loopback(address: str, host: str | None) -> bool:
    """Return whether only this machine is reached: by a path, or by a host whose every address is loopback.

    A socket in the abstract namespace, `ipc://@NAME`, has no rights: every user of the machine may use it. Raises
    `AddressError` for a name that does not resolve.
    """
    if host is None:
        return not address.startswith("ipc://@")
    if host == "*":
        return False
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise AddressError(
            f"{address}: the name {host} does not resolve ({reason}), so it may be of another machine; "
            "correct the address or the DNS, or say insecure=True (--insecure) if you trust the network"
        ) from error
    return all(_names_loopback(str(place[0])) for *_, place in found)


def _names_loopback(numeric: str) -> bool:
    number = ipaddress.ip_address(numeric.partition("%")[0])
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return (mapped or number).is_loopback
