"""Measure what encryption costs: the hub's channel and bare libzmq, plain and CURVE.

Run as `python -m benchmarks.security_curve`. One client sends messages with a payload, up to a
window of unanswered ones. A small message answers each. The exit code is 1 if encryption uses more
processor time than its bounds.
"""

import argparse
import asyncio
import itertools
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvloop
import zmq

from benchmarks.processes import PATIENCE_S, Children
from benchmarks.report import Form, Results, benchmark, show_progress
from edgeasync.durable.keys import KeyPair
from edgeasync.net.channel import Channel
from edgeasync.net.curve import FRAME_BYTES, serve_keys, use_keys
from edgeasync.net.zap import ZapHandler

MIB = 1 << 20
HEADER = bytes(64)
ANSWER = bytes(64)
CPU_MS_PER_MIB_MAX = 3.0
CPU_US_PER_MESSAGE_MAX = 40.0
SHARE_OF_MESSAGES_MIN = 0.6

Socket = zmq.Socket[bytes]


@dataclass(frozen=True)
class Case:
    """A payload size, the number of messages in flight, and the messages per turn."""

    name: str
    payload_bytes: int
    window: int
    messages: dict[Form, int]


CASES = (
    Case("4 KiB", 4096, 64, {Form.FULL: 40_000, Form.SHORT: 10_000, Form.QUICK: 300}),
    Case("1 MiB", MIB, 8, {Form.FULL: 1_500, Form.SHORT: 400, Form.QUICK: 20}),
)
ROUNDS = {Form.FULL: 7, Form.SHORT: 5, Form.QUICK: 1}
WARM_UP = 0.2
"""Messages before a turn, as a share of its messages, because connections start slowly."""


@dataclass(frozen=True)
class Turn:
    """The result of a server's turn; processor time is that of its whole process."""

    messages_per_s: float
    cpu_us: float


class Meter:
    """Measures elapsed and processor time from one message to another."""

    def __init__(self, skipped: int, counted: int) -> None:
        self._skipped, self._last = skipped, skipped + counted
        self._counted = counted
        self._seen = 0
        self.turn: Turn | None = None

    def count(self) -> bool:
        """Count a message; return whether it was the last."""
        self._seen += 1
        if self._seen == self._skipped:
            self._began_s, self._cpu_s = time.perf_counter(), time.process_time()
        if self._seen == self._last:
            seconds, cpu_s = time.perf_counter() - self._began_s, time.process_time() - self._cpu_s
            self.turn = Turn(self._counted / seconds, 1e6 * cpu_s / self._counted)
        return self._seen >= self._last


def bind(context: "zmq.Context[Socket]", case: Case, pair: KeyPair | None) -> Socket:
    """Return a ROUTER like a hub's."""
    router = context.socket(zmq.ROUTER)
    if pair is not None:
        serve_keys(router, pair)
    router.set(zmq.MAXMSGSIZE, max(case.payload_bytes, MIB) + FRAME_BYTES)
    router.set(zmq.LINGER, 0)
    router.bind("tcp://127.0.0.1:*")
    return router


def serve_channel(
    case: Case, meter: Meter, pair: KeyPair | None, client: bytes, tell: Callable[[str], None]
) -> None:
    """Receive through the hub's channel on the hub's loop; with keys, check each sender."""

    async def serve() -> None:
        loop, context, done = asyncio.get_running_loop(), zmq.Context(), asyncio.Event()
        zap = ZapHandler(context, loop, lambda key, _: key == client) if pair is not None else None
        router = bind(context, case, pair)

        def on_message(peer: bytes, _: bytes, __: object) -> None:
            if pair is not None:
                assert channel.user_id == client.hex()
                assert channel.descriptor
            channel.send(peer, ANSWER)
            if meter.count():
                done.set()

        channel = Channel(router, loop, on_message)
        tell(router.get_string(zmq.LAST_ENDPOINT))
        await done.wait()
        channel.close(100)
        if zap is not None:
            zap.close()
        context.destroy(linger=100)

    uvloop.run(serve())


def serve_bare(case: Case, meter: Meter, pair: KeyPair | None, client: bytes, tell: Callable[[str], None]) -> None:
    """Receive in a blocking loop; a separate thread admits the keys."""

    async def answer_zap(context: "zmq.Context[Socket]", ready: Any) -> None:
        zap = ZapHandler(context, asyncio.get_running_loop(), lambda key, _: key == client)
        ready.set()
        await asyncio.to_thread(ended.wait)
        zap.close()

    context, ended, ready = zmq.Context(), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(answer_zap(context, ready)))
    if pair is not None:
        thread.start()
        ready.wait()
    router = bind(context, case, pair)
    tell(router.get_string(zmq.LAST_ENDPOINT))
    last, small = False, case.payload_bytes < MIB  # for a small frame, zero-copy costs more
    while not last:
        frames = router.recv_multipart() if small else router.recv_multipart(copy=False)
        router.send_multipart([frames[0], ANSWER])
        last = meter.count()
    ended.set()
    if pair is not None:
        thread.join()
    context.destroy(linger=100)


SERVERS = {"channel": serve_channel, "bare libzmq": serve_bare}


def serve(name: str, case: Case, counted: int, keys: tuple[bytes, bytes] | None, pipe: Any) -> None:
    """Run a server as a process: send its address, then the turn's result.

    `keys` are its own secret key and the client's public key.
    """
    meter = Meter(max(1, int(WARM_UP * counted)), counted)
    pair, client = (None, b"") if keys is None else (KeyPair.of(keys[0]), keys[1])
    SERVERS[name](case, meter, pair, client, pipe.send)
    pipe.send(meter.turn)


def push(address: str, case: Case, messages: int, keys: tuple[bytes, bytes] | None, _: object) -> None:
    """Run the client as a process: send messages, at most `window` of them unanswered.

    `keys` are its own secret key and the server's public key.
    """
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.LINGER, 0)
    dealer.set(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
    if keys is not None:
        use_keys(dealer, KeyPair.of(keys[0]), keys[1])
    dealer.connect(address)
    payload = bytes(case.payload_bytes)
    for number in range(messages + case.window):
        if number < messages:
            dealer.send(HEADER, zmq.SNDMORE)
            dealer.send(payload, copy=False)
        if number >= case.window:
            dealer.recv()
    context.destroy(linger=0)


def measure(name: str, case: Case, form: Form, *, keys: bool) -> Turn:
    """Run one server's turn."""
    hub, client, counted = KeyPair.make(), KeyPair.make(), case.messages[form]
    total = max(1, int(WARM_UP * counted)) + counted
    with Children() as children:
        server = children.start(serve, name, case, counted, (hub.secret, client.public) if keys else None)
        address = server.hear()
        children.start(push, address, case, total, (client.secret, hub.public) if keys else None)
        turn = server.hear()
    assert isinstance(turn, Turn)
    return turn


def measure_case(case: Case, form: Form, results: Results) -> None:
    """Run all four servers in turn, and compare their medians."""
    kinds = list(itertools.product(SERVERS, (False, True)))
    turns: dict[tuple[str, bool], list[Turn]] = {kind: [] for kind in kinds}
    for number in range(ROUNDS[form]):
        show_progress(f"{case.name}: round {number + 1} of {ROUNDS[form]}")
        for name, keys in kinds:
            turns[name, keys].append(measure(name, case, form, keys=keys))
    rate = {kind: statistics.median(turn.messages_per_s for turn in of) for kind, of in turns.items()}
    cpu = {kind: statistics.median(turn.cpu_us for turn in of) for kind, of in turns.items()}
    for name, keys in kinds:
        columns = {"messages/s": round(rate[name, keys]), "CPU a message, us": round(cpu[name, keys], 1)}
        results.add(case.name, f"{name}, {'CURVE' if keys else 'plain'}", columns)
    more_us = cpu["channel", True] - cpu["channel", False]
    share = rate["channel", True] / rate["channel", False]
    if case.payload_bytes == MIB:
        results.bound("CPU of encryption, a message of 1 MiB", more_us / 1e3, CPU_MS_PER_MIB_MAX)
    else:
        results.bound("CPU of encryption, a message of 4 KiB", more_us, CPU_US_PER_MESSAGE_MAX)
        results.ratio("4 KiB: messages under CURVE over plain", share, SHARE_OF_MESSAGES_MIN)


@benchmark("What encryption costs a hub.")
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure all cases."""
    for case in CASES:
        measure_case(case, arguments.form, results)


if __name__ == "__main__":
    main()
