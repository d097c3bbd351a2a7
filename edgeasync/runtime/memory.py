"""The most memory that a hub may need, as a sum of named parts: each is what a limit of the hub allows.

The sum is what the hub holds at once if everybody sends as much as it may. A flood that is cut off is part of it:
`unread` is what lies unread before a connection is shut, and what comes in between two looks.
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
"""Stacks of threads, and what the allocator keeps of memory that was freed."""

BETWEEN_LOOKS_BYTES = 64 << 20
"""What the kernel and libzmq receive before the hub looks again: 2 GB/s."""

CONNECTION_BYTES = 24 << 10
"""Of one connection, in libzmq, in the hub and in the kernel."""

DEVICE_BYTES = 12 << 10
"""Of one device that the hub knows, live or not."""

STATUS_BYTES = 2 << 10
"""Of one device in a status and in a checkpoint."""

ROW_BYTES = 1 << 10
"""Of one row of the history that waits for the disk, with metrics."""

WRITTEN_ROW_BYTES = 128
"""Of one row in the history's file, twice, as while that is thinned."""

ANSWER_BYTES = 1 << 10
SENDER_BYTES = 1 << 10


class Part(msgspec.Struct, frozen=True):
    """A part of the sum, and which limit it comes from."""

    name: str
    nbytes: int
    why: str


def most_memory(spec: ParameterSpec, settings: RunSettings, *, evaluated: bool) -> list[Part]:
    """Return the parts of a hub that is made in this process, and does not run yet."""
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
        Part("published", 3 * payload, "the published chain and what is offered of it"),
        Part("beside the chain", OFF_CHAIN_MAX * (model + payload), f"what {OFF_CHAIN_MAX} devices hold"),
        Part("snapshots", snapshots, f"limits.snapshots_max = {limits.snapshots_max} versions being sent"),
        Part(
            "updates",
            2 * (limits.updates_held_max + 1) * payload,
            f"limits.updates_held_max = {limits.updates_held_max}, as they came and opened",
        ),
        Part("rows", whole, "whole updates side by side, for a combiner that looks at them"),
        Part(
            "unread",
            unread_bytes_max(limits) + BETWEEN_LOOKS_BYTES,
            "in libzmq's queues, all connections together",
        ),
        Part("connections", connections * CONNECTION_BYTES, f"{connections:,} connections"),
        Part("devices", limits.devices_max * DEVICE_BYTES, f"limits.devices_max = {limits.devices_max:,}"),
        Part("journal", backlog, "entries that wait for the disk"),
        Part("history", rows, f"hub.history_rows_max = {history_rows_max:,}, and rows that wait for the disk"),
        Part("answers", answers * ANSWER_BYTES, f"{answers:,} that wait for the disk"),
        Part("checkpoint", (optimizer + 1) * model + limits.devices_max * STATUS_BYTES, "while it is written"),
        Part("status", 4 * limits.devices_max * STATUS_BYTES, "while it is told"),
        Part("bounds", (SENDERS_MAX + 2 * ADDRESSES_MAX) * SENDER_BYTES, "what keys and addresses have used"),
    ]
