"""The kernel filter that rejects connections from blocked addresses."""

import contextlib
import ipaddress
import socket
import struct

import pytest

from edgeasync.net.listener_filter import ADDRESSES_MAX, ListenerFilter, make_program


def connects(server, source):
    """Return whether an address of this machine gets a connection."""
    with contextlib.suppress(TimeoutError), socket.create_connection(server, 0.3, (source, 0)):
        return True
    return False


def test_an_address_that_is_held_off_cannot_connect_and_what_it_has_stays():
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
        with socket.create_connection(where, 1.0, ("127.0.0.2", 0)) as before, server.accept()[0] as accepted:
            listener = ListenerFilter(server.fileno())
            listener.drop(["127.0.0.3", "::1", "127.0.0.2"])
            assert not connects(where, "127.0.0.2")
            assert not connects(where, "127.0.0.3")
            assert connects(where, "127.0.0.1")
            before.sendall(b"still here")
            assert accepted.recv(10) == b"still here"
            listener.drop([])
            assert connects(where, "127.0.0.2")


@pytest.mark.parametrize("count", [1, 2, ADDRESSES_MAX])
def test_a_program_has_as_many_addresses_as_there_are(count):
    """Run by an interpreter of its own: every jump ends where it should."""
    old = [ipaddress.ip_address((10 << 24) + number) for number in range(count)]
    new = [ipaddress.ip_address((0xFD << 120) + number) for number in range(count)]
    program = make_program([*map(str, (*old, *new)), "::ffff:192.0.2.1"])
    for address in (*old, *new, ipaddress.ip_address("192.0.2.1")):
        assert not keeps(program, address)
    for other in ("10.1.0.0", "192.0.2.2", "fd00:1::", "fe00::", "::1"):
        assert keeps(program, ipaddress.ip_address(other))


def keeps(program, source):
    """Run a filter on a packet from an address."""
    header = bytearray(40)
    header[0] = source.version << 4
    place = 12 if source.version == 4 else 8
    header[place : place + len(source.packed)] = source.packed
    network = 0x100000000 - 0x100000
    instructions = [*struct.iter_unpack("=HBBI", program)]
    at = register = 0
    while True:
        code, when_equal, otherwise, value = instructions[at]
        at += 1
        match code:
            case 0x20:
                register = int.from_bytes(header[value - network : value - network + 4], "big")
            case 0x30:
                register = header[value - network]
            case 0x54:
                register &= value
            case 0x15:
                at += when_equal if register == value else otherwise
            case 0x06:
                return value != 0
