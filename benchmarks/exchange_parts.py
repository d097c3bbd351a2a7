"""What each part of an exchange costs by itself: one thread, no sockets, microseconds per update."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.exchange_servers import LINEAGE, POLICY, make_assignment, make_spec
from edgeasync.core.arrays.combine import norm_of
from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.hub.effects import Fold
from edgeasync.core.hub.events import HubReceived, PushArrived
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings
from edgeasync.policies.transforms import Conditions, plan_chain
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import VectorSource, make_codec
from edgeasync.protocol.messages import Ack, Applied, Hello, ModelVersion, Push

BATCHES = 7
PUSHES = 2000


def measure_parts(length: int, clients: int, seconds: float) -> dict[str, float]:
    """Time every part for a model of `length` values; each gets about `seconds`."""
    spec, policy = make_spec(length), POLICY
    rng = np.random.default_rng(2)
    codec = make_codec("identity", spec)
    payload = codec.encode(VectorSource(rng.normal(0.0, 1e-3, length).astype(np.float32)))
    push = make_push(bytes(16), 1, 0, wire.checksum(payload), len(payload))
    push_header = wire.encode(push)
    update = codec.open(payload)
    model = HubModel(spec, np.zeros(length, np.float32), 0, policy)
    plan = plan_chain(policy.optimizer, Conditions(1.0, 0))
    snapshot = model.current
    assignment = make_assignment(snapshot, 2**63, len(payload), 0, Ack(1, Applied(1)))
    coded = snapshot.payload(codec)[0]

    def fold() -> None:
        model.advance(model.fold(Fold(model.current.number + 1, (0,), (0.5,), plan), [update])[0])

    return {
        "header decode": _time(lambda: wire.decode(push_header), seconds),
        "header encode": _time(lambda: wire.encode(assignment), seconds),
        "checksum": _time(lambda: wire.checksum(payload), seconds),
        "norm": _time(lambda: norm_of(update), seconds),
        "fold": _time(fold, seconds),
        "snapshot checksum": _time(lambda: wire.checksum(coded), seconds),
        "core.handle": _time_core(clients),
    }


def make_push(session: bytes, seq: int, number: int, checksum: int, payload_bytes: int) -> Push:
    """Return a push like those of the exchange's clients."""
    return Push(
        session=session,
        seq=seq,
        base=ModelVersion(LINEAGE, number),
        local_steps=16,
        examples=512,
        loss_mean=1.0,
        loss_variance=0.1,
        step_s=0.01,
        codec="identity",
        checksum=checksum,
        payload_bytes=payload_bytes,
    )


def _time(work: Callable[[], object], seconds: float) -> float:
    """Return microseconds per call: the median of batches that take about `seconds` in all."""
    work()
    start = time.perf_counter()
    work()
    count = max(1, int(seconds / BATCHES / max(time.perf_counter() - start, 1e-7)))
    batches = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in itertools.repeat(None, count):
            work()
        batches.append((time.perf_counter() - start) / count)
    return 1e6 * statistics.median(batches)


def _time_core(clients: int) -> float:
    """Return the microseconds that the core takes for a push with its whole payload.

    The clients join first, and the pushes are made in advance, so that only the core's decisions are timed.
    """
    sessions = [bytes((number,)) * 16 for number in range(clients)]
    given: Iterator[bytes] = iter(sessions)
    core = HubCore(
        spec=make_spec(1),
        training={},
        policy=POLICY,
        settings=HubCoreSettings(codec=FLOAT32),
        version=ModelVersion(LINEAGE, 0),
        make_session=lambda: next(given),
        now_s=0.0,
    )
    for session in sessions:
        name = f"client-{session[0]}"
        core.handle(HubReceived(session, Hello(name, session, 1)), 0.0)
    batches = []
    for batch in range(BATCHES):
        numbers = range(batch * PUSHES, (batch + 1) * PUSHES)
        events = [
            PushArrived(session, make_push(session, 1 + n // clients, max(0, n - clients), 0, 4), n, 1.0)
            for n in numbers
            for session in (sessions[n % clients],)
        ]
        start = time.perf_counter()
        for event in events:
            core.handle(event, 1.0)
        batches.append((time.perf_counter() - start) / PUSHES)
    assert core.updates_applied == BATCHES * PUSHES
    return 1e6 * statistics.median(batches)
