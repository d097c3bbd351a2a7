"""Compute a hub's maximum memory as a sum of named parts. A limit determines each part.

The hub needs this much memory if every device sends as much as its limits allow. The part `unread`
covers a flood of messages: the bytes that a connection may queue before the hub closes it, plus the
bytes that arrive between two checks by the hub.
"""

import msgspec

from edgeasync.core.arrays.buffers import POOLED_BYTES_MIN
from edgeasync.core.arrays.off_chain_models import OFF_CHAIN_MAX
from edgeasync.core.engine.log_writer import ANSWERS_MIN, ANSWERS_PER_DEVICE, WAITING_BYTES_MIN
from edgeasync.core.engine.message_bounds import SENDERS_MAX
from edgeasync.durable.history_writer import WAITING_MAX
from edgeasync.host.host_info import resident_bytes
from edgeasync.net.connection_bounds import SPARE_MAX, STRANGERS_MAX
from edgeasync.net.failing_addresses import ADDRESSES_MAX
from edgeasync.net.unread_bytes import unread_bytes_max
from edgeasync.parameters import ParameterSpec
from edgeasync.policies.transforms import state_vectors
from edgeasync.protocol.codecs import payload_bytes_limit
from edgeasync.runtime.hub_settings import RunSettings

THREADS_BYTES = 32 << 20
"""Memory for thread stacks, and freed memory that the allocator retains."""

BETWEEN_LOOKS_BYTES = 64 << 20
"""Bytes that the kernel and libzmq receive, at 2 GB/s, between two checks by the hub."""

CONNECTION_BYTES = 24 << 10
"""Memory per connection in libzmq, the hub and the kernel."""

DEVICE_BYTES = 12 << 10
"""Memory per device that the hub knows, live or not."""

STATUS_BYTES = 2 << 10
"""Memory per device in a status and in a checkpoint."""

ROW_BYTES = 1 << 10
"""Memory per history row that waits to be written to disk, including its metrics."""

WRITTEN_ROW_BYTES = 128
"""Memory per written history row while old rows are removed from the file. Removal needs two copies."""

ANSWER_BYTES = 1 << 10
SENDER_BYTES = 1 << 10


class Part(msgspec.Struct, frozen=True):
    """A part of a hub's memory, and the limit that determines its size."""

    name: str
    nbytes: int
    why: str


def most_memory(spec: ParameterSpec, settings: RunSettings, *, evaluated: bool) -> list[Part]:
    """Return the memory parts of a hub that this process has created and not yet started."""
    limits, policy, model = settings.limits, settings.policy, spec.nbytes
    journal, history_rows_max = settings.hub.durability == "journal", settings.hub.history_rows_max
    optimizer = state_vectors(tuple(policy.optimizer))
    copies = 2 + 2 * policy.monitor.rolls_back + optimizer + 2 + evaluated
    payload = payload_bytes_limit(spec)
    snapshots = limits.snapshots_max * max(model, POOLED_BYTES_MIN)
    connections = limits.devices_max + SPARE_MAX + STRANGERS_MAX
    backlog = 2 * max(WAITING_BYTES_MIN, 4 * model) if journal else 0
    answers = max(ANSWERS_MIN, ANSWERS_PER_DEVICE * limits.devices_max) if journal else 0
    whole = limits.updates_held_max * model if policy.combine.whole else 0
    rows = WAITING_MAX * ROW_BYTES + history_rows_max * WRITTEN_ROW_BYTES if history_rows_max else 0
    return [
        Part("process", resident_bytes() + THREADS_BYTES, "interpreter, libraries, data, threads"),
        Part("model", copies * model, f"{copies} copies: versions, optimizer, scratch"),
        Part("published", 3 * payload, "the published chain of versions and its payloads"),
        Part("beside the chain", OFF_CHAIN_MAX * (model + payload), f"models of {OFF_CHAIN_MAX} devices"),
        Part("snapshots", snapshots, f"limits.snapshots_max = {limits.snapshots_max} versions being sent"),
        Part(
            "updates",
            2 * (limits.updates_held_max + 1) * payload,
            f"limits.updates_held_max = {limits.updates_held_max}, encoded and decoded",
        ),
        Part("rows", whole, "whole updates, for a combiner that compares them"),
        Part(
            "unread",
            unread_bytes_max(limits) + BETWEEN_LOOKS_BYTES,
            "libzmq's queues of all connections",
        ),
        Part("connections", connections * CONNECTION_BYTES, f"{connections:,} connections"),
        Part("devices", limits.devices_max * DEVICE_BYTES, f"limits.devices_max = {limits.devices_max:,}"),
        Part("journal", backlog, "entries that wait for the disk"),
        Part("history", rows, f"hub.history_rows_max = {history_rows_max:,}, and rows that wait for the disk"),
        Part("answers", answers * ANSWER_BYTES, f"{answers:,} answers that wait for the disk"),
        Part(
            "checkpoint",
            (optimizer + 1) * model + limits.devices_max * STATUS_BYTES,
            "while a checkpoint is written",
        ),
        Part("status", 4 * limits.devices_max * STATUS_BYTES, "while a status is sent"),
        Part("bounds", (SENDERS_MAX + 2 * ADDRESSES_MAX) * SENDER_BYTES, "usage per key and address"),
    ]
