"""Saves and restores the core, the model and the published model.

The state does not include:

- the measurements of connections (`Member.link`), and the codecs selected from them,
- the counts of malformed messages on connections without a member,
- the counts of all messages since the start.

`encode_state` defines the bytes.

The state of a large model is saved in two parts. Call `note`, which is fast, right after an event.
Then call `complete`, which adds the arrays. At that time, all effects that were queued when `note`
was called must be done, and no later effect may have begun.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from edgeasync.core.arrays.hub_model import HubModel, ModelState, Snapshot, WaitingUpdates
from edgeasync.core.arrays.published_model import Publisher, PublisherState
from edgeasync.core.arrays.state_codec import Array, decode_state, encode_state, take_values
from edgeasync.core.hub.budgets import BudgetState
from edgeasync.core.hub.events import Evaluated
from edgeasync.core.hub.frozen_arrays import FrozenState
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.lifecycle import LifecycleState
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.policy_state import PolicyEngineState
from edgeasync.core.hub.publish_schedule import PublishState
from edgeasync.core.hub.pushes import PushesState
from edgeasync.errors import StorageError
from edgeasync.parameters import ParameterSpec, Vector

SCALARS = "scalars"

TOLERANCE = 1e-6
"""Maximum relative difference of two floats in core states that count as equal.

Machines may round differently.
"""


class CoreState(msgspec.Struct):
    """The durable fields of `HubCore` and its parts.

    `fingerprint` is the fingerprint of the model's spec.
    """

    fingerprint: str
    lifecycle: LifecycleState
    pushes: PushesState
    policy_engine: PolicyEngineState
    members: list[Member]
    publish_schedule: PublishState
    budgets: BudgetState
    frozen_arrays: FrozenState


class Note(msgspec.Struct, frozen=True):
    """The first part of a `HubState`.

    `entry` is the number of the last log entry that it covers.
    """

    core: bytes
    waiting: WaitingUpdates
    entry: int | None
    now_s: float
    lineage: str
    updates_applied: int
    evaluation: Evaluated | None


class HubState(msgspec.Struct, frozen=True):
    """The state of a hub at one moment: named arrays of float32 and bytes, and a summary.

    The array of each parameter contains its values in `snapshot`. Other vectors are flat arrays,
    and scalars are encoded as bytes. The caller must not change the arrays, because they may be the
    hub's own. `evaluation` is the last evaluation, of this version or an earlier one.
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
    """Encode the core's durable state. Deterministic."""
    return encode_state(
        CoreState(
            fingerprint=core.spec.fingerprint,
            lifecycle=core.lifecycle.state,
            pushes=core.pushes.state,
            policy_engine=core.policy_engine.state,
            members=core.members.dump_state(),
            publish_schedule=core.publish_schedule.state,
            budgets=core.budgets.state,
            frozen_arrays=core.frozen_arrays.state,
        )
    )


def load_state(core: HubCore, state: bytes) -> None:
    """Restore the state into a new core with the same model and settings.

    Raises `StorageError` if the state is invalid or belongs to another model.
    """
    found = decode_state(state, CoreState)
    if found.fingerprint != core.spec.fingerprint:
        raise StorageError("the hub's state belongs to another model; resume with that model, or start a new run")
    core.lifecycle.state = found.lifecycle
    core.pushes.state = found.pushes
    core.policy_engine.load_state(found.policy_engine)
    core.members.load_state(found.members)
    core.publish_schedule.state = found.publish_schedule
    core.budgets.state = found.budgets
    core.frozen_arrays.state = found.frozen_arrays
    for member in core.members.members.values():
        core.codecs.begin(member)


def note(core: HubCore, model: HubModel, entry: int | None, now_s: float) -> Note:
    """Encode the state of the core, and capture the buffered updates."""
    return Note(
        core=dump_state(core),
        waiting=model.waiting([one.handle for one in core.policy_engine.state.gathering.contributions]),
        entry=entry,
        now_s=now_s,
        lineage=core.lineage,
        updates_applied=core.updates_applied,
        evaluation=core.policy_engine.state.evaluations.last,
    )


def complete(note: Note, model: HubModel, publisher: Publisher) -> HubState:
    """Add the arrays to a note, once the effects that were queued at its time are done."""
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


def capture(core: HubCore, model: HubModel, publisher: Publisher, entry: int | None, now_s: float) -> HubState:
    """Return the state of a hub that has no queued effects."""
    return complete(note(core, model, entry, now_s), model, publisher)


def restore(tensors: Mapping[str, Array], core: HubCore, model: HubModel, publisher: Publisher) -> None:
    """Restore a new hub with the same model and settings from the arrays of a state.

    Raises `StorageError` for invalid arrays. The core, the model and the publisher may then be
    partially restored, and must not be used.
    """
    scalars, parameters, arrays = _take_apart(tensors, model.spec)
    load_state(core, scalars.core)
    model.load_state(scalars.model, parameters, arrays)
    publisher.load_state(scalars.publisher, arrays)


def restore_core(tensors: Mapping[str, Array], core: HubCore) -> Vector:
    """Restore a core for inspection; return the values of the model.

    The core may have a different policy from that of the state. Raises `StorageError` for invalid
    arrays.
    """
    scalars, parameters, _ = _take_apart(tensors, core.spec)
    load_state(core, scalars.core)
    return core.spec.flatten(
        {one.name: take_values(parameters, one.name, one.shape) for one in core.spec.parameters}
    )


def _take_apart(
    tensors: Mapping[str, Array], spec: ParameterSpec
) -> tuple[_Scalars, Mapping[str, Array], Mapping[str, Array]]:
    """Split a state into scalars, parameters and other arrays; raises `StorageError`."""
    prefix, names = _prefix(spec), {parameter.name for parameter in spec.parameters}
    parameters = {name: array for name, array in tensors.items() if name in names}
    arrays = {name.removeprefix(prefix): array for name, array in tensors.items() if name not in names}
    if SCALARS not in arrays:
        raise StorageError(
            f"the hub's state is incomplete: array {SCALARS!r} is missing; choose an older checkpoint"
        )
    return decode_state(arrays[SCALARS].tobytes(), _Scalars), parameters, arrays


def succeed(core: HubCore, old: HubCore) -> None:
    """Initialize a new core with other policies from an old core, at the same version.

    Devices, their last outcomes and operators' orders are carried over. All other state of the
    policies is reset.
    """
    core.members.load_state(old.members.dump_state())
    new, before = core.policy_engine.state, old.policy_engine.state
    new.ancestry = before.ancestry
    new.evaluations.best = before.evaluations.best
    new.divergence.orders = before.divergence.orders
    new.updates_applied, new.updates_rejected = before.updates_applied, before.updates_rejected
    core.lifecycle.state.saved_updates = before.updates_applied
    core.pushes.state = old.pushes.state
    core.budgets.state = old.budgets.state
    core.frozen_arrays.state = old.frozen_arrays.state
    for member in core.members.members.values():
        member.codecs_push, member.follows = (), False
        core.codecs.begin(member)


def find_difference(found: HubState, saved: HubState, spec: ParameterSpec) -> str:
    """Return where and how two states of one model differ, or "" if they are equal.

    Arrays must be bit-identical. Floats outside the arrays may differ by `TOLERANCE`.
    """
    scalars = _prefix(spec) + SCALARS
    for name in sorted({*found.tensors, *saved.tensors} - {scalars}):
        pair = [state.tensors.get(name, np.empty(0, np.uint8)) for state in (found, saved)]
        if pair[0].shape != pair[1].shape or pair[0].tobytes() != pair[1].tobytes():
            return f"array {name}"
    one, other = [decode_state(state.tensors[scalars].tobytes(), _Scalars) for state in (found, saved)]
    return (
        _difference("core", decode_state(one.core, CoreState), decode_state(other.core, CoreState))
        or _difference("model", one.model, other.model)
        or _difference("publisher", one.publisher, other.publisher)
    )


def _difference(path: str, found: Any, saved: Any) -> str:
    """Return the path at which two decoded values differ, with both values, or ""."""
    pairs: list[tuple[str, Any, Any]] | None = None
    if type(found) is type(saved):
        if isinstance(found, msgspec.Struct):
            fields = found.__struct_fields__
            pairs = [(f"{path}.{name}", getattr(found, name), getattr(saved, name)) for name in fields]
        elif isinstance(found, dict) and found.keys() == saved.keys():
            pairs = [(f"{path}[{key!r}]", found[key], saved[key]) for key in found]
        elif isinstance(found, list | tuple | deque) and len(found) == len(saved):
            pairs = [(f"{path}[{place}]", *two) for place, two in enumerate(zip(found, saved, strict=True))]
    if pairs is not None:
        return next(filter(None, (_difference(*pair) for pair in pairs)), "")
    if found == saved or (isinstance(found, float) and isinstance(saved, float) and _is_close(found, saved)):
        return ""
    return f"{path} is {found!r} now but {saved!r} in the checkpoint"


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=TOLERANCE) or (math.isnan(one) and math.isnan(other))


def _prefix(spec: ParameterSpec) -> str:
    """Return a prefix that makes the names of other arrays differ from all parameters' names."""
    prefix = ""
    kinds = ("optimizer/", "kept/", "update/", "chain/", "published", SCALARS)
    while any(
        parameter.name.startswith(tuple([prefix + kind for kind in kinds])) for parameter in spec.parameters
    ):
        prefix += "hub/"
    return prefix
