"""Block addresses in the kernel.

The kernel drops the first packet of a connection from such an address, at no cost to the hub. The
filter is a classic BPF program on the listening socket, and needs no privileges. It sees only
packets to the listener, so existing connections are not affected.
"""

import asyncio
import contextlib
import ctypes
import ipaddress
import socket
import struct
from collections.abc import Collection

from edgeasync.net.failing_addresses import FailingAddresses

ADDRESSES_MAX = 64

RELEASE_S = 0.1
"""Interval at which expired blocks are removed."""

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_NETWORK = 0x100000000 - 0x100000  # SKF_NET_OFF: where the packet's network header begins
_LOAD_WORD, _LOAD_BYTE, _AND, _JUMP_EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x06
_SOURCE_4, _SOURCE_6 = _NETWORK + 12, _NETWORK + 8
_KEEP, _DROP = 0xFFFFFFFF, 0

_Instruction = tuple[int, int, int, int]


class ListenerFilter:
    """The filter of one listening socket, whose descriptor is owned by libzmq."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def drop(self, addresses: Collection[str]) -> None:
        """Drop packets from the first `ADDRESSES_MAX` of these addresses.

        Packets from other addresses are no longer dropped. If the system does not support such
        filters, no packet is dropped.
        """
        with contextlib.suppress(OSError):
            borrowed = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=self.descriptor)
            try:
                if not addresses:
                    borrowed.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
                    return
                program = make_program([*addresses][:ADDRESSES_MAX])
                code = ctypes.create_string_buffer(program, len(program))
                described = struct.pack("HP", len(program) // 8, ctypes.addressof(code))
                borrowed.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
            finally:
                borrowed.detach()


class AddressBarrier:
    """Passes the blocked addresses to the filter `listener`, once `listener` is set."""

    def __init__(self, loop: asyncio.AbstractEventLoop, failing: FailingAddresses) -> None:
        self.listener: ListenerFilter | None = None
        self._loop = loop
        self._failing = failing
        self._kept_off: list[str] = []
        self._timer: asyncio.TimerHandle | None = None

    def update(self) -> None:
        """Block addresses that were added since the last call."""
        if len(self._failing.held_off) > len(self._kept_off):
            self._look()

    def close(self) -> None:
        """Stop updating the filter."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Update the filter. While any address is blocked, schedule the next update."""
        self._failing.release(self._loop.time())
        held_off = [*self._failing.held_off]
        if self.listener is not None and held_off != self._kept_off:
            self.listener.drop(held_off)
        self._kept_off = held_off
        self.close()
        self._timer = self._loop.call_later(RELEASE_S, self._look) if held_off else None


def make_program(addresses: Collection[str]) -> bytes:
    """Return a BPF program that drops packets from these IPv4 and IPv6 addresses."""
    old: list[_Instruction] = [(_LOAD_WORD, 0, 0, _SOURCE_4)]
    new: list[_Instruction] = []
    for address in addresses:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else parsed
        if mapped is not None:
            old += [(_JUMP_EQUAL, 0, 1, int(mapped)), (_RETURN, 0, 0, _DROP)]
            continue
        words = struct.unpack(">4I", parsed.packed)
        for place, word in enumerate(words):
            new += [(_LOAD_WORD, 0, 0, _SOURCE_6 + 4 * place), (_JUMP_EQUAL, 0, 2 * (3 - place) + 1, word)]
        new.append((_RETURN, 0, 0, _DROP))
    keep: _Instruction = (_RETURN, 0, 0, _KEEP)
    begin: list[_Instruction] = [(_LOAD_BYTE, 0, 0, _NETWORK), (_AND, 0, 0, 0xF0)]
    begin.append((_JUMP_EQUAL, 0, len(old) + 1, 0x40))
    return b"".join(struct.pack("=HBBI", *each) for each in [*begin, *old, keep, *new, keep])
