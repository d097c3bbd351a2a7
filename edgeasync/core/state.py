"""Everything that decides a hub's future, written down and put back: the core, the model, what is published of it.

Left out on purpose: what is measured of connections (`Member.link`, and the codec chosen by it), strikes of
strangers, and the counts of messages since the start. `seal` says what the bytes are.

A large model is written down in two halves. `note` is called right after an event and takes next to no time; what
then stands in line must have been done, and nothing after it begun, when `complete` adds the arrays.
"""

import msgspec

from edgeasync.core.hub import HubCore
from edgeasync.core.judge import JudgeState
from edgeasync.core.membership import MembershipState
from edgeasync.core.model import Model, ModelState, WaitingUpdates
from edgeasync.core.publication import PublicationState
from edgeasync.core.published import Publisher, PublisherState
from edgeasync.core.sealed import Array, seal, unseal
from edgeasync.errors import StorageError
from edgeasync.parameters import ParameterSpec


class CoreState(msgspec.Struct):
    """What is durable of `HubCore`; the `fingerprint` is that of the model it is of."""

    fingerprint: str
    lineage: str
    judge: JudgeState
    members: MembershipState
    publication: PublicationState
    updates_applied: int
    updates_rejected: int
    duplicates: int
    stopped: bool
    save_at_s: float
    stop_at_s: float


class HubState(msgspec.Struct, frozen=True):
    """A hub at one moment: `scalars` as `seal` makes them, and named arrays of float32 and bytes.

    The model is in the arrays of its parameters; other vectors are flat. Arrays may be the hub's own: they never
    change, and are not to be changed.
    """

    scalars: bytes
    arrays: dict[str, Array]


class Note(msgspec.Struct, frozen=True):
    """The first half of a `HubState`."""

    core: bytes
    waiting: WaitingUpdates


class _Scalars(msgspec.Struct):
    core: bytes
    model: ModelState
    publisher: PublisherState | None


def freeze(core: HubCore) -> bytes:
    """Return the core's durable state; the same state gives the same bytes."""
    return seal(
        CoreState(
            fingerprint=core.spec.fingerprint,
            lineage=core.lineage,
            judge=core.judge.freeze(),
            members=core.members.freeze(),
            publication=core.publication.freeze(),
            updates_applied=core.updates_applied,
            updates_rejected=core.updates_rejected,
            duplicates=core.duplicates,
            stopped=core.stopped,
            save_at_s=core.save_at_s,
            stop_at_s=core.stop_at_s,
        )
    )


def thaw(core: HubCore, state: bytes) -> None:
    """Let a new core of the same model and settings go on from there; raises `StorageError` if it cannot."""
    found = unseal(state, CoreState)
    if found.fingerprint != core.spec.fingerprint:
        raise StorageError("the hub's state is of another model; go on with that one, or begin a new run")
    core.lineage = found.lineage
    core.judge.thaw(found.judge)
    core.members.thaw(found.members)
    core.publication.thaw(found.publication)
    core.updates_applied = found.updates_applied
    core.updates_rejected = found.updates_rejected
    core.duplicates = found.duplicates
    core.stopped = found.stopped
    core.save_at_s = found.save_at_s
    core.stop_at_s = found.stop_at_s
    for member in core.members.members.values():
        core.codecs.begin(member)


def note(core: HubCore, model: Model) -> Note:
    """Write down the core, and keep hold of the updates that it lets wait."""
    return Note(freeze(core), model.waiting(core.judge.handles))


def complete(note: Note, model: Model, publisher: Publisher) -> HubState:
    """Add the arrays to a note, once what stood in line when it was taken has been done."""
    model_state, model_arrays = model.freeze(note.waiting)
    publisher_state, publisher_arrays = publisher.freeze()
    prefix = _prefix(model.spec)
    arrays: dict[str, Array] = {**model.spec.views(model.current.vector)}
    arrays |= {prefix + name: array for name, array in (model_arrays | publisher_arrays).items()}
    return HubState(seal(_Scalars(note.core, model_state, publisher_state)), arrays)


def capture(core: HubCore, model: Model, publisher: Publisher) -> HubState:
    """Write down a hub where nothing stands in line."""
    return complete(note(core, model), model, publisher)


def restore(state: HubState, core: HubCore, model: Model, publisher: Publisher) -> None:
    """Let a new hub of the same model and settings go on from there; raises `StorageError` if it cannot.

    What was given is then half restored, and of no use.
    """
    scalars = unseal(state.scalars, _Scalars)
    prefix, names = _prefix(model.spec), {parameter.name for parameter in model.spec.parameters}
    parameters = {name: array for name, array in state.arrays.items() if name in names}
    arrays = {name.removeprefix(prefix): array for name, array in state.arrays.items() if name not in names}
    thaw(core, scalars.core)
    model.thaw(scalars.model, parameters, arrays)
    publisher.thaw(scalars.publisher, arrays)


def _prefix(spec: ParameterSpec) -> str:
    """Return what names of other arrays begin with: nothing, unless a parameter has such a name."""
    prefix = ""
    kinds = ("optimizer/", "kept/", "history/", "update/", "chain/", "published")
    while any(
        parameter.name.startswith(tuple([prefix + kind for kind in kinds])) for parameter in spec.parameters
    ):
        prefix += "hub/"
    return prefix
