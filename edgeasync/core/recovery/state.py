"""Everything that decides a hub's future, written down and put back: the core, the model, what is published of it.

Left out on purpose: what is measured of connections (`Member.link`, and the codec chosen by it), strikes of
strangers, and the counts of messages since the start. `seal` says what the bytes are.

A large model is written down in two halves. `note` is called right after an event and takes next to no time; what
then stands in line must have been done, and nothing after it begun, when `complete` adds the arrays.
"""

from collections.abc import Mapping

import msgspec
import numpy as np

from edgeasync.core.arrays.hub_model import Model, ModelState, Snapshot, WaitingUpdates
from edgeasync.core.arrays.published_model import Publisher, PublisherState
from edgeasync.core.arrays.state_codec import Array, seal, unseal
from edgeasync.core.hub.events import Evaluated
from edgeasync.core.hub.machine import HubCore
from edgeasync.core.hub.membership import Member
from edgeasync.core.hub.policy_engine import JudgeState
from edgeasync.core.hub.publish_schedule import PublicationState
from edgeasync.errors import StorageError
from edgeasync.parameters import ParameterSpec

SCALARS = "scalars"


class CoreState(msgspec.Struct):
    """What is durable of `HubCore`; the `fingerprint` is that of the model it is of."""

    fingerprint: str
    judge: JudgeState
    members: list[Member]
    publication: PublicationState
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


def freeze(core: HubCore) -> bytes:
    """Return the core's durable state; the same state gives the same bytes."""
    return seal(
        CoreState(
            fingerprint=core.spec.fingerprint,
            judge=core.judge.freeze(),
            members=core.members.freeze(),
            publication=core.publication.freeze(),
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


def thaw(core: HubCore, state: bytes) -> None:
    """Let a new core of the same model and settings go on from there; raises `StorageError` if it cannot."""
    found = unseal(state, CoreState)
    if found.fingerprint != core.spec.fingerprint:
        raise StorageError("the hub's state is of another model; go on with that one, or begin a new run")
    core.judge.thaw(found.judge)
    core.members.thaw(found.members)
    core.publication.thaw(found.publication)
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
        core=freeze(core),
        waiting=model.waiting(core.judge.handles),
        entry=entry,
        now_s=now_s,
        lineage=core.lineage,
        updates_applied=core.updates_applied,
        evaluation=core.judge.progress.last,
    )


def complete(note: Note, model: Model, publisher: Publisher) -> HubState:
    """Add the arrays to a note, once what stood in line when it was taken has been done."""
    model_state, arrays = model.freeze(note.waiting)
    publisher_state, published = publisher.freeze()
    arrays |= published
    arrays[SCALARS] = np.frombuffer(seal(_Scalars(note.core, model_state, publisher_state)), np.uint8)
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
    scalars = unseal(arrays[SCALARS].tobytes(), _Scalars)
    thaw(core, scalars.core)
    model.thaw(scalars.model, parameters, arrays)
    publisher.thaw(scalars.publisher, arrays)


def succeed(core: HubCore, old: HubCore) -> None:
    """Let a new core of the same model take over from another under other rules, at the same version.

    It knows the same devices, and what each was answered; what policies had gathered begins anew.
    """
    core.members.thaw(old.members.freeze())
    core.judge.ancestry = old.judge.ancestry
    core.judge.progress.best = old.judge.progress.best
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
