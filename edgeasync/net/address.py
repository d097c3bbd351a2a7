"""Parse and check addresses: `tcp://HOST:PORT`, `ipc://PATH`, or `inproc://NAME` within a process."""

import ipaddress
import socket

from edgeasync.errors import AddressError

DEFAULT_ADDRESS = "tcp://127.0.0.1:5555"
"""The default address on which a hub listens and to which clients connect."""

BIND, HUB = "bind (--bind)", "hub (--hub)"
"""The names of the address settings and their flags, for error messages."""


def check_bind(address: str, *, insecure: bool) -> None:
    """Raise `AddressError` unless the address is a loopback address or `insecure` is true."""
    host = _read(address, BIND, any_port=True)
    if not insecure and not _is_loopback(address, host):
        raise AddressError(
            f"{address}: without keys, anybody on that network could join; set up keys ('edgeasync keys init', "
            "then --keys), bind to 127.0.0.1, or set insecure=True (--insecure) if you trust that network"
        )


def is_within_machine(address: str) -> bool:
    """Return whether an address to bind is TCP on a loopback interface.

    Names other than `localhost` are not resolved, because they may resolve to another machine a
    moment later. Raises `AddressError` for an invalid address.
    """
    host = (_read(address, BIND, any_port=True) or "").strip("[]")
    try:
        return host == "localhost" or _names_loopback(host)
    except ValueError:
        return False


def is_same_host(address: str) -> bool:
    """Return whether an address to connect to is an IPC socket or on a loopback interface.

    Names other than `localhost` are not resolved.
    """
    return address.startswith("ipc://") or is_within_machine(address)


def check_connect(address: str, *, insecure: bool, name: str = HUB) -> None:
    """Raise `AddressError` if it is not safe to connect to an address without keys.

    It is safe if it is a loopback address. If `insecure` is true, every valid address is allowed.
    `name` is the name of the setting for the error message.
    """
    host = host_of(address, name)
    if not insecure and not _is_loopback(address, host):
        raise AddressError(
            f"{address}: is on another machine, and without keys anybody on the network path could read and "
            "change messages; enrol this device ('edgeasync keys enrol NAME' at the hub, then --enrol TOKEN), or "
            "set insecure=True (--insecure) if you trust that network"
        )


def host_of(address: str, name: str = "") -> str | None:
    """Return the host of an address to connect to, or `None` if the transport is not TCP.

    Raises `AddressError`.
    """
    return _read(address, name, any_port=False)


def is_ipv6(address: str) -> bool:
    """Return whether an address is IPv6: in brackets, or a name that has no IPv4 address.

    A name that has addresses of both families counts as IPv4. The call blocks while the name is
    resolved.
    """
    if "[" in address:
        return True
    host = _read(address, "", any_port=True)
    return host is not None and not _has(host, socket.AF_INET) and _has(host, socket.AF_INET6)


def _has(host: str, family: int) -> bool:
    """Return whether a name resolves to an address of this family."""
    try:
        return bool(socket.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return False


def _read(address: str, name: str, *, any_port: bool) -> str | None:
    """Return the host of a TCP address, or `None` for other transports.

    `name` is the name of the setting for the error message.
    """
    transport, _, place = address.partition("://")
    if transport in ("ipc", "inproc") and place:
        return None
    host, _, port = place.rpartition(":")
    # libzmq would silently truncate a larger number to 16 bits and use another port.
    valid = (port.isdecimal() and 0 < int(port) <= 65_535) or (any_port and port == "*")
    # In the file of a hub's keys, white space separates addresses.
    if transport != "tcp" or not host or any(map(str.isspace, host)) or not valid:
        where = f"{name}: " if name else ""
        raise AddressError(
            f"{where}{address!r} is not an address; use tcp://HOST:PORT, such as tcp://127.0.0.1:5555"
        )
    return host


def _is_loopback(address: str, host: str | None) -> bool:
    """Return whether an address is a path, or a host that has only loopback addresses.

    A socket in the abstract namespace, `ipc://@NAME`, has no permissions, so every user of the
    machine can connect to it. Raises `AddressError` for a name that cannot be resolved.
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
            f"{address}: cannot resolve the name {host} ({reason}), so it may belong to another machine; "
            "correct the address or the DNS, or set insecure=True (--insecure) if you trust the network"
        ) from error
    return all(_names_loopback(str(place[0])) for *_, place in found)


def _names_loopback(numeric: str) -> bool:
    number = ipaddress.ip_address(numeric.partition("%")[0])
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return (mapped or number).is_loopback
