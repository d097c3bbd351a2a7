"""Everything that decides a hub's future, written down and put back: the core, the model, what is published of it.

Left out on purpose: what is measured of connections (`Member.link`, and the codec chosen by it), strikes of
strangers, and the counts of messages since the start. `encode_state` says what the bytes are.

A large model is written down in two halves. `note` is called right after an event and takes next to no time; what
then stands in line must have been done, and nothing after it begun, when `complete` adds the arrays.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from edgeasync.core.arrays.hub_model import Model, ModelState, Snapshot, WaitingUpdates
from edgeasync.core.arrays.published_model import Publisher, PublisherState
from edgeasync.core.arrays.state_codec import Array, decode_state, encode_state
from edgeasync.core.hub.events import Evaluated
from edgeasync.core.hub.machine import HubCore, HubCoreState
from edgeasync.core.hub.membership import Member
from edgeasync.core.hub.policy_engine import PolicyEngineState
from edgeasync.core.hub.publish_schedule import PublishState
from edgeasync.errors import StorageError
from edgeasync.parameters import ParameterSpec

SCALARS = "scalars"


class CoreState(msgspec.Struct):
    """What is durable of `HubCore` and of its parts; the `fingerprint` is that of the model it is of."""

    fingerprint: str
    hub: HubCoreState
    policy_engine: PolicyEngineState
    members: list[Member]
    publish_schedule: PublishState


def upgrade(core: dict[str, Any], made_by: int) -> dict[str, Any]:
    """Return the fields of a `CoreState` of an older format as this one names and places them."""
    if made_by == 4:
        return core  # members had no key
    if made_by < 3:
        core["policy_engine"] = engine = core.pop("judge")
        core["publish_schedule"] = core.pop("publication")
        engine["cadence"] = engine.pop("tempo")
        engine["cadence"]["steps_factor"] = engine["cadence"].pop("haste")
        engine["evaluations"] = engine.pop("progress")
        engine["divergence"] = engine.pop("guard")
    engine, divergence = core["policy_engine"], core["policy_engine"]["divergence"]
    engine["spoken"] = dict.fromkeys(engine.pop("refused"))
    divergence["counted"] = dict.fromkeys(divergence["counted"])
    divergence["alarms"] = {(alarm["watch"], alarm["device_id"]): alarm for alarm in divergence["alarms"]}
    for name in ("updates_applied", "updates_rejected"):
        engine[name] = core.pop(name)
    core["hub"] = {name: core.pop(name) for name in HubCoreState.__struct_fields__}
    return core


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
            hub=core.state,
            policy_engine=core.policy_engine.state,
            members=core.members.dump_state(),
            publish_schedule=core.publish_schedule.state,
        )
    )


def load_state(core: HubCore, state: bytes) -> None:
    """Let a new core of the same model and settings resume from there; raises `StorageError` if it cannot."""
    found = decode_state(state, CoreState, upgrade)
    if found.fingerprint != core.spec.fingerprint:
        raise StorageError("the hub's state is of another model; resume that one, or begin a new run")
    core.state = found.hub
    core.policy_engine.load_state(found.policy_engine)
    core.members.load_state(found.members)
    core.publish_schedule.state = found.publish_schedule
    for member in core.members.members.values():
        core.codecs.begin(member)


def note(core: HubCore, model: Model, entry: int | None, now_s: float) -> Note:
    """Write down the core, and keep hold of the updates that it lets wait."""
    return Note(
        core=dump_state(core),
        waiting=model.waiting([one.handle for one in core.policy_engine.state.contributions]),
        entry=entry,
        now_s=now_s,
        lineage=core.lineage,
        updates_applied=core.updates_applied,
        evaluation=core.policy_engine.state.evaluations.last,
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

    It knows the same devices, and what each was answered; what policies had gathered begins from nothing.
    """
    core.members.load_state(old.members.dump_state())
    new, before = core.policy_engine.state, old.policy_engine.state
    new.ancestry = before.ancestry
    new.evaluations.best = before.evaluations.best
    new.updates_applied, new.updates_rejected = before.updates_applied, before.updates_rejected
    core.state.saved_updates = before.updates_applied
    core.state.duplicates = old.state.duplicates
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
