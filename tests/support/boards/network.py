"""Hosts in network namespaces of their own, joined by links with a rate, a delay, losses and cuts.

A process of this module reads each host's packets from a TUN device in the host's namespace, and writes them into
the namespace of the receiver when the links let them through. It needs root and /dev/net/tun, and no other
program but `nsenter`. The namespaces have no names, so they end with the processes in them.
"""

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import math
import multiprocessing
import os
import random
import select
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFFLAGS, IFF_UP = 0x8916, 0x891C, 0x8914, 0x1
PACKET_BYTES_MAX = 1 << 16
QUEUE_BYTES_MIN = 64 << 10
QUEUE_S = 0.1
"""As in a router, a packet is dropped if those before it need more time, and are more bytes than the least."""


@dataclass(frozen=True)
class Link:
    """A host's link. Each direction has a rate, a delay, losses and a queue of its own; a cut concerns both.

    The link is cut for `cut_for_s` at the end of every `cut_every_s`, counted from the host's first packet, and
    each time that a further number of bytes in `cut_at_bytes` has passed, both directions together.
    """

    bit_per_s: float = math.inf
    delay_s: float = 0.0
    loss: float = 0.0
    cut_for_s: float = 0.0
    cut_every_s: float = math.inf
    cut_at_bytes: tuple[int, ...] = ()


class Network:
    """A hub's host, and one more host for each link. Use it in a `with`; raises `OSError` where it cannot be."""

    hub = "10.77.0.1"

    def __init__(self, *links):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_forward, args=(theirs, links), daemon=True)
        self._process.start()
        theirs.close()
        started = self._pipe.recv()
        if isinstance(started, OSError):
            self._process.join()
            raise started
        self._namespaces = started

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pipe.close()
        self._process.join()

    def at(self, host):
        """Return the command under which a process runs at host 0, the hub's, or at that of the first link, 1."""
        return ("nsenter", f"--net=/proc/{self._process.pid}/fd/{self._namespaces[host]}", "--")

    def passed_bytes(self, host):
        """Return how many bytes of packets have passed a host's link: to it, and from it."""
        self._pipe.send(host)
        return self._pipe.recv()


class _Way:
    """One direction of a link."""

    def __init__(self, link, seed):
        self.passed_bytes = 0
        self._link, self._random = link, random.Random(seed)
        self._queue_s = max(QUEUE_S, 8 * QUEUE_BYTES_MIN / link.bit_per_s)
        self._free_at_s = 0.0

    def arrival_s(self, now_s, size):
        """Return when a packet of that size arrives, or `None` if it is lost."""
        begin_s = max(now_s, self._free_at_s)
        if begin_s - now_s > self._queue_s or self._random.random() < self._link.loss:
            return None
        self._free_at_s = begin_s + 8 * size / self._link.bit_per_s
        self.passed_bytes += size
        return self._free_at_s + self._link.delay_s


class _Host:
    """A host: its namespace, the TUN device in it, and its link."""

    def __init__(self, number, link):
        self.address = socket.inet_aton(f"10.77.0.{1 + number}")
        self.down, self.up = _Way(link, (number, "down").__repr__()), _Way(link, (number, "up").__repr__())
        self._link = link
        self._first_s = None
        self._cuts = list(link.cut_at_bytes)
        self._cut_until_s = 0.0
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no network namespace can be made")
        self.namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
        self.tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.tun, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")  # every kernel has it
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            for request, address in ((SIOCSIFADDR, self.address), (SIOCSIFNETMASK, b"\xff\xff\xff\0")):
                value = struct.pack("16sHH4s16x", b"eth0", socket.AF_INET, 0, address)
                fcntl.ioctl(any_socket, request, value)
            for name in (b"lo", b"eth0"):
                fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", name, IFF_UP))

    def is_cut(self, now_s):
        """Whether this host's link is cut now; a host is asked for each of its packets."""
        link = self._link
        self._first_s = self._first_s or now_s
        if self._cuts and self.down.passed_bytes + self.up.passed_bytes >= self._cuts[0]:
            del self._cuts[0]
            self._cut_until_s = now_s + link.cut_for_s
        in_period_s = (now_s - self._first_s) % link.cut_every_s
        return now_s < self._cut_until_s or in_period_s >= link.cut_every_s - link.cut_for_s


def _forward(pipe, links):
    try:
        hosts = [_Host(number, link) for number, link in enumerate((Link(), *links))]
    except OSError as error:
        pipe.send(error)
        return
    pipe.send([host.namespace for host in hosts])
    by_address, by_tun = {host.address: host for host in hosts}, {host.tun: host for host in hosts}
    waiting, order = [], itertools.count()
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for ready in select.select([pipe, *by_tun], [], [], wait_s)[0]:
            if ready is pipe:
                try:
                    host = hosts[pipe.recv()]
                except EOFError:
                    return
                pipe.send((host.down.passed_bytes, host.up.passed_bytes))
                continue
            packet, now_s = os.read(ready, PACKET_BYTES_MAX), time.monotonic()
            sender, receiver = by_tun[ready], by_address.get(packet[16:20])  # nobody, if it is a packet of IPv6
            if receiver is not None and not sender.is_cut(now_s) and not receiver.is_cut(now_s):
                heapq.heappush(waiting, (now_s, next(order), (sender.up, receiver.down), receiver.tun, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            now_s, _, ways, tun, packet = heapq.heappop(waiting)
            if not ways:
                with contextlib.suppress(BlockingIOError):
                    os.write(tun, packet)
            elif (arrival_s := ways[0].arrival_s(now_s, len(packet))) is not None:
                heapq.heappush(waiting, (arrival_s, next(order), ways[1:], tun, packet))
