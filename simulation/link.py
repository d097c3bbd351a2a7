"""A simulated link: bytes leave one after the other at a rate, and arrive after a delay, in order."""

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random

import msgspec

from edgeasync.protocol.wire import Buffer
from simulation.clock import VirtualClock
from simulation.link_faults import LinkFaults


class LinkProfile(msgspec.Struct, frozen=True):
    """Rates in bytes a second, delay one way in seconds."""

    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    delay_s: float = 0.0


class _Message:
    """Something on its way; without `deliver` it is lost."""

    __slots__ = ("arrives_s", "deliver", "left_s")

    def __init__(self, deliver: Callable[[], None], left_s: float, arrives_s: float) -> None:
        self.deliver: Callable[[], None] | None = deliver
        self.left_s = left_s
        self.arrives_s = arrives_s


class LinkDirection:
    """One direction of a link; `trouble` is what happens to messages from now on, drawn by the seed."""

    def __init__(self, clock: VirtualClock, bytes_per_s: float, delay_s: float, seed: str = "") -> None:
        self.bytes_sent = 0
        self.bytes_per_s = bytes_per_s
        """The rate of what is sent from now on."""
        self.trouble: LinkFaults | None = None
        self._random = Random(seed)
        self._clock = clock
        self._delay_s = delay_s
        self._free_at_s = 0.0
        self._on_the_way: deque[_Message] = deque()

    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        """Call `deliver` when the last byte has arrived."""
        self._free_at_s = max(self._free_at_s, self._clock.now_s) + size_bytes / self.bytes_per_s
        self.bytes_sent += size_bytes
        self._dispatch(deliver, self._free_at_s)

    def send_message(
        self, header: bytes, payload: Buffer | None, arrive: Callable[[bytes, Buffer | None], None]
    ) -> None:
        """Call `arrive` with what arrives of a message, when it does."""
        size = len(header) + len(payload or b"")
        if self.trouble is None:
            self.send(size, lambda: arrive(header, payload))
            return
        content = None if payload is None else bytes(payload)
        copies = self.trouble.meet(header, content, self._random, self._clock.now_s)
        for delay_s, header_then, payload_then in copies:
            self.send(size, partial(self._clock.after, delay_s, partial(arrive, header_then, payload_then)))
        if not copies:
            self.send(size, lambda: None)  # what is lost takes its time on the link all the same

    def cut(self) -> None:
        """Lose what has not left yet; what is in the air arrives."""
        now_s = self._clock.now_s
        if self._free_at_s <= now_s:
            return
        while self._on_the_way and self._on_the_way[-1].left_s > now_s:
            self._on_the_way.pop().deliver = None
        self.bytes_sent -= round((self._free_at_s - now_s) * self.bytes_per_s)
        self._free_at_s = now_s

    def _dispatch(self, deliver: Callable[[], None], left_s: float) -> None:
        arrives_s = left_s + self._delay_s
        if self._on_the_way:
            arrives_s = max(arrives_s, self._on_the_way[-1].arrives_s)
        message = _Message(deliver, left_s, arrives_s)
        self._on_the_way.append(message)

        def arrive() -> None:
            if message.deliver is not None:
                self._on_the_way.popleft()
                message.deliver()

        self._clock.at(arrives_s, arrive)
