"""Saves and restores all state that decides what a hub does next: the core, the model, the published model.

Left out on purpose: measurements of connections (`Member.link`, and the codec chosen for it), strikes of
strangers, and the counts of messages since the start. `encode_state` defines the bytes.

A large model's state is saved in two halves. Call `note`, which is quick, right after an event. Call `complete`,
which adds the arrays, when all effects queued at that time are done and no later one has begun.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from edgeasync.core.arrays.hub_model import Model, ModelState, Snapshot, WaitingUpdates
from edgeasync.core.arrays.published_model import Publisher, PublisherState
from edgeasync.core.arrays.state_codec import Array, decode_state, encode_state, take_values
from edgeasync.core.hub.budgets import BudgetState
from edgeasync.core.hub.digests import digest
from edgeasync.core.hub.events import Evaluated
from edgeasync.core.hub.frozen_arrays import FrozenState
from edgeasync.core.hub.machine import HubCore, HubCoreState
from edgeasync.core.hub.membership import Member
from edgeasync.core.hub.policy_engine import PolicyEngineState
from edgeasync.core.hub.publish_schedule import PublishState
from edgeasync.errors import StorageError
from edgeasync.parameters import ParameterSpec, Vector

SCALARS = "scalars"


class CoreState(msgspec.Struct):
    """The durable fields of `HubCore` and its parts; `fingerprint` is that of the model's spec."""

    fingerprint: str
    hub: HubCoreState
    policy_engine: PolicyEngineState
    members: list[Member]
    publish_schedule: PublishState
    budgets: BudgetState = msgspec.field(default_factory=BudgetState)
    frozen_arrays: FrozenState = msgspec.field(default_factory=FrozenState)


def upgrade(core: dict[str, Any], made_by: int) -> dict[str, Any]:
    """Convert the fields of a `CoreState` of an older format to the names and places of this one."""
    if made_by < 4:
        _rename(core, made_by)
    if made_by < 6:
        _take_digests(core)
        _give_to_voters(core)  # format 4 had no keys
    if made_by < 7:
        _count_causes(core)
    if made_by < 10:
        _unwrap_firsts(core)
    return core  # format 6 counted no bytes, format 7 no paces, format 8 no delays, format 10 no frozen arrays


_STATE_ID, _SESSION, _RETIRED, _KEY = map(
    Member.__struct_fields__.index, ("state_id", "session", "retired", "key")
)


def _take_digests(core: dict[str, Any]) -> None:
    """Put digests in the place of sessions and state ids, which members had themselves up to format 5."""
    for member in core["members"]:
        for place in _STATE_ID, _SESSION:
            member[place] = digest(member[place]) if member[place] else b""
        member[_RETIRED] = [digest(state_id) for state_id in member[_RETIRED]]


def _give_to_voters(core: dict[str, Any]) -> None:
    """Give what was kept by device id to voters; their next updates bring the votes that were not kept."""
    engine, fleet = core["policy_engine"], core["policy_engine"]["fleet"]
    keys = {member[0]: member[_KEY].hex() for member in core["members"] if len(member) > _KEY}
    last = {keys.get(device_id) or device_id: norm for device_id, norm in fleet.pop("norms").items()}
    for name, share in (("lengths", lambda _: 1.0), ("norms", math.sqrt), ("gradients", float)):
        fleet[name] = {"newest": {voter: norm / share(local_steps) for voter, (norm, local_steps) in last.items()}}
    fleet.pop("scores")
    for contribution in engine["contributions"]:
        contribution["voter"] = keys.get(contribution["device_id"]) or contribution["device_id"]
    for alarm in engine["divergence"]["alarms"].values():
        alarm["voter"] = keys.get(alarm["device_id"]) or alarm["device_id"]


_HISTORY = Member.__struct_fields__.index("history")
_RUNS = (19, 14)
"""Places in a device's history, up to format 6, of counts that the guard has now; the last one first."""


def _count_causes(core: dict[str, Any]) -> None:
    """Drop what format 6 kept to count bad updates in a row, and the first norms."""
    for member in core["members"]:
        for place in _RUNS:
            del member[_HISTORY][place : place + 1]
    core["policy_engine"]["fleet"].pop("norms_first", None)


def _unwrap_firsts(core: dict[str, Any]) -> None:
    """Take the voters' first numbers out of the table that format 9 kept them in; it kept votes in order, too."""
    fleet = core["policy_engine"]["fleet"]
    for votes in [fleet[name] for name in ("lengths", "norms", "gradients", "base_losses") if name in fleet]:
        votes["firsts"] = votes.get("firsts", {}).get("newest", {})


def _rename(core: dict[str, Any], made_by: int) -> None:
    """Give the fields of a `CoreState` of formats 1 to 3 their names and places of today."""
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
    core["hub"] = {name: core.pop(name) for name in HubCoreState.__struct_fields__ if name in core}


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
    """A hub at one moment: named arrays of float32 and bytes, and a summary for people.

    The model of `snapshot` is in the arrays of its parameters. Other vectors are flat arrays, and scalars are
    encoded as bytes. Do not change the arrays, which may be the hub's own. `evaluation` is the last one, of this
    version or an earlier one.
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
            budgets=core.budgets.state,
            frozen_arrays=core.frozen_arrays.state,
        )
    )


def load_state(core: HubCore, state: bytes) -> None:
    """Resume a new core of the same model and settings from a state; raises `StorageError` if it cannot."""
    found = decode_state(state, CoreState, upgrade)
    if found.fingerprint != core.spec.fingerprint:
        raise StorageError("the hub's state is of another model; resume that one, or begin a new run")
    core.state = found.hub
    core.policy_engine.load_state(found.policy_engine)
    core.members.load_state(found.members)
    core.publish_schedule.state = found.publish_schedule
    core.budgets.state = found.budgets
    core.frozen_arrays.state = found.frozen_arrays
    for member in core.members.members.values():
        core.codecs.begin(member)


def note(core: HubCore, model: Model, entry: int | None, now_s: float) -> Note:
    """Encode the core's state, and keep the updates that wait."""
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
    """Add the arrays to a note, when the effects that were queued at the time of the note are done."""
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
    """Return the state of a hub that has no effects queued."""
    return complete(note(core, model, entry, now_s), model, publisher)


def restore(tensors: Mapping[str, Array], core: HubCore, model: Model, publisher: Publisher) -> None:
    """Resume a new hub of the same model and settings from its arrays; raises `StorageError` if it cannot.

    After an error core, model and publisher may be half restored: do not use them.
    """
    scalars, parameters, arrays = _take_apart(tensors, model.spec)
    load_state(core, scalars.core)
    model.load_state(scalars.model, parameters, arrays)
    publisher.load_state(scalars.publisher, arrays)


def restore_core(tensors: Mapping[str, Array], core: HubCore) -> Vector:
    """Resume a core under whatever policy, to be looked at; return the model's current version.

    Raises `StorageError` if it cannot.
    """
    scalars, parameters, _ = _take_apart(tensors, core.spec)
    load_state(core, scalars.core)
    return core.spec.flatten(
        {one.name: take_values(parameters, one.name, one.shape) for one in core.spec.parameters}
    )


def _take_apart(
    tensors: Mapping[str, Array], spec: ParameterSpec
) -> tuple[_Scalars, Mapping[str, Array], Mapping[str, Array]]:
    """Return the scalars, the model's parameters and the other arrays of a state; raises `StorageError`."""
    prefix, names = _prefix(spec), {parameter.name for parameter in spec.parameters}
    parameters = {name: array for name, array in tensors.items() if name in names}
    arrays = {name.removeprefix(prefix): array for name, array in tensors.items() if name not in names}
    if SCALARS not in arrays:
        raise StorageError(f"the hub's state is not whole: {SCALARS} is missing")
    return decode_state(arrays[SCALARS].tobytes(), _Scalars), parameters, arrays


def succeed(core: HubCore, old: HubCore) -> None:
    """Let a new core of the same model take over from an old one under other rules, at the same version.

    It keeps the devices and their last outcomes. The state of the policies begins from scratch.
    """
    core.members.load_state(old.members.dump_state())
    new, before = core.policy_engine.state, old.policy_engine.state
    new.ancestry = before.ancestry
    new.evaluations.best = before.evaluations.best
    new.updates_applied, new.updates_rejected = before.updates_applied, before.updates_rejected
    core.state.saved_updates = before.updates_applied
    core.state.duplicates, core.state.pushes_answered = old.state.duplicates, old.state.pushes_answered
    core.budgets.state = old.budgets.state
    core.frozen_arrays.state = old.frozen_arrays.state
    for member in core.members.members.values():
        member.codecs_push, member.follows = (), False
        core.codecs.begin(member)


def _prefix(spec: ParameterSpec) -> str:
    """Return a prefix for the names of other arrays: empty, unless a parameter has such a name."""
    prefix = ""
    kinds = ("optimizer/", "kept/", "history/", "update/", "chain/", "published", SCALARS)
    while any(
        parameter.name.startswith(tuple([prefix + kind for kind in kinds])) for parameter in spec.parameters
    ):
        prefix += "hub/"
    return prefix
