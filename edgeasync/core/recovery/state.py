"""Everything that decides a hub's future, written down and put back: the core, the model, what is published of it.

Left out on purpose: what is measured of connections (`Member.link`, and the codec chosen by it), strikes of
strangers, and the counts of messages since the start. `encode_state` says what the bytes are.

A large model is written down in two halves. `note` is called right after an event and takes next to no time; what
then stands in line must have been done, and nothing after it begun, when `complete` adds the arrays.
"""

from collections.abc import Mapping

import msgspec
import numpy as np

from edgeasync.core.arrays.hub_model import Model, ModelState, Snapshot, WaitingUpdates
from edgeasync.core.arrays.published_model import Publisher, PublisherState
from edgeasync.core.arrays.state_codec import Array, Renames, decode_state, encode_state
from edgeasync.core.hub.events import Evaluated
from edgeasync.core.hub.machine import HubCore
from edgeasync.core.hub.membership import Member
from edgeasync.core.hub.policy_engine import PolicyEngineState
from edgeasync.core.hub.publish_schedule import PublishScheduleState
from edgeasync.errors import StorageError
from edgeasync.parameters import ParameterSpec

SCALARS = "scalars"

RENAMED_IN_3: Renames = {
    "judge": (
        "policy_engine",
        {
            "tempo": ("cadence", {"haste": ("steps_factor", {})}),
            "progress": ("evaluations", {}),
            "guard": ("divergence", {}),
        },
    ),
    "publication": ("publish_schedule", {}),
}
"""What `CoreState` calls otherwise since format 3."""


class CoreState(msgspec.Struct):
    """What is durable of `HubCore`; the `fingerprint` is that of the model it is of."""

    fingerprint: str
    policy_engine: PolicyEngineState
    members: list[Member]
    publish_schedule: PublishScheduleState
    updates_applied: int
    updates_rejected: int
    duplicates: int
    stopped: bool
    save_at_s: float
    saved_version: int
    saved_updates: int
    stop_at_s: float


class Note(msgspec.Struct, frozen=True):
    """The first half of a `HubState`. `entry` is the last entry of the log that it covers, if there is a log."""

    core: bytes
    waiting: WaitingUpdates
    entry: int | None
    now_s: float
    lineage: str
    updates_applied: int
    evaluation: Evaluated | None


class HubState(msgspec.Struct, frozen=True):
    """A hub at one moment: named arrays of float32 and bytes, and what a person wants to know of them.

    The model, of `snapshot`, is in the arrays of its parameters; other vectors are flat, and scalars are sealed
    bytes. Arrays may be the hub's own: they never change, and are not to be changed. The `evaluation` is the last
    one, of this version or one before.
    """

    entry: int | None
    now_s: float
    lineage: str
    updates_applied: int
    evaluation: Evaluated | None
    snapshot: Snapshot
    tensors: dict[str, Array]


class _Scalars(msgspec.Struct):
    core: bytes
    model: ModelState
    publisher: PublisherState | None


def dump_state(core: HubCore) -> bytes:
    """Return the core's durable state; the same state gives the same bytes."""
    return encode_state(
        CoreState(
            fingerprint=core.spec.fingerprint,
            policy_engine=core.policy_engine.dump_state(),
            members=core.members.dump_state(),
            publish_schedule=core.publish_schedule.dump_state(),
            updates_applied=core.updates_applied,
            updates_rejected=core.updates_rejected,
            duplicates=core.duplicates,
            stopped=core.stopped,
            save_at_s=core.save_at_s,
            saved_version=core.saved_version,
            saved_updates=core.saved_updates,
            stop_at_s=core.stop_at_s,
        )
    )


def load_state(core: HubCore, state: bytes) -> None:
    """Let a new core of the same model and settings go on from there; raises `StorageError` if it cannot."""
    found = decode_state(state, CoreState, RENAMED_IN_3)
    if found.fingerprint != core.spec.fingerprint:
        raise StorageError("the hub's state is of another model; go on with that one, or begin a new run")
    core.policy_engine.load_state(found.policy_engine)
    core.members.load_state(found.members)
    core.publish_schedule.load_state(found.publish_schedule)
    core.updates_applied = found.updates_applied
    core.updates_rejected = found.updates_rejected
    core.duplicates = found.duplicates
    core.stopped = found.stopped
    core.save_at_s = found.save_at_s
    core.saved_version, core.saved_updates = found.saved_version, found.saved_updates
    core.stop_at_s = found.stop_at_s
    for member in core.members.members.values():
        core.codecs.begin(member)


def note(core: HubCore, model: Model, entry: int | None, now_s: float) -> Note:
    """Write down the core, and keep hold of the updates that it lets wait."""
    return Note(
        core=dump_state(core),
        waiting=model.waiting(core.policy_engine.handles),
        entry=entry,
        now_s=now_s,
        lineage=core.lineage,
        updates_applied=core.updates_applied,
        evaluation=core.policy_engine.evaluations.last,
    )


def complete(note: Note, model: Model, publisher: Publisher) -> HubState:
    """Add the arrays to a note, once what stood in line when it was taken has been done."""
    model_state, arrays = model.dump_state(note.waiting)
    publisher_state, published = publisher.dump_state()
    arrays |= published
    arrays[SCALARS] = np.frombuffer(encode_state(_Scalars(note.core, model_state, publisher_state)), np.uint8)
    prefix = _prefix(model.spec)
    tensors: dict[str, Array] = {**model.spec.views(model.current.vector)}
    tensors |= {prefix + name: array for name, array in arrays.items()}
    return HubState(
        entry=note.entry,
        now_s=note.now_s,
        lineage=note.lineage,
        updates_applied=note.updates_applied,
        evaluation=note.evaluation,
        snapshot=model.current,
        tensors=tensors,
    )


def capture(core: HubCore, model: Model, publisher: Publisher, entry: int, now_s: float) -> HubState:
    """Write down a hub where nothing stands in line."""
    return complete(note(core, model, entry, now_s), model, publisher)


def restore(tensors: Mapping[str, Array], core: HubCore, model: Model, publisher: Publisher) -> None:
    """Let a new hub of the same model and settings go on from there; raises `StorageError` if it cannot.

    What was given is then half restored, and of no use.
    """
    prefix, names = _prefix(model.spec), {parameter.name for parameter in model.spec.parameters}
    parameters = {name: array for name, array in tensors.items() if name in names}
    arrays = {name.removeprefix(prefix): array for name, array in tensors.items() if name not in names}
    if SCALARS not in arrays:
        raise StorageError(f"the hub's state is not whole: {SCALARS} is missing")
    scalars = decode_state(arrays[SCALARS].tobytes(), _Scalars)
    load_state(core, scalars.core)
    model.load_state(scalars.model, parameters, arrays)
    publisher.load_state(scalars.publisher, arrays)


def succeed(core: HubCore, old: HubCore) -> None:
    """Let a new core of the same model take over from another under other rules, at the same version.

    It knows the same devices, and what each was answered; what policies had gathered begins anew.
    """
    core.members.load_state(old.members.dump_state())
    core.policy_engine.ancestry = old.policy_engine.ancestry
    core.policy_engine.evaluations.best = old.policy_engine.evaluations.best
    core.updates_applied, core.saved_updates = old.updates_applied, old.updates_applied
    core.updates_rejected = old.updates_rejected
    core.duplicates = old.duplicates
    for member in core.members.members.values():
        member.codecs_push, member.follows = (), False
        core.codecs.begin(member)


def _prefix(spec: ParameterSpec) -> str:
    """Return what names of other arrays begin with: nothing, unless a parameter has such a name."""
    prefix = ""
    kinds = ("optimizer/", "kept/", "history/", "update/", "chain/", "published", SCALARS)
    while any(
        parameter.name.startswith(tuple([prefix + kind for kind in kinds])) for parameter in spec.parameters
    ):
        prefix += "hub/"
    return prefix
