"""Detects a plugin whose decisions in a replay differ from those in the run.

The decisions of built-in policies are not compared. Another machine may round their scalars
differently, and a replay uses the scalars of the log. If a plugin decides differently, the run
cannot be resumed, because the hub's state would differ from that of the run.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.hub.effects import Fold
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.recovery.log import Entry
from edgeasync.errors import PluginError
from edgeasync.policies.guards import plugin_name, plugins_of

TOLERANCE = 1e-6
"""Two scalars count as equal if their relative difference is at most this.

Machines may round differently.
"""

REMEDY = (
    "a policy must depend only on its keys and arguments; if its package has changed, install the version "
    "that the run used"
)


def check_decisions(
    plugins: dict[str, Any], number: int, version: int, folds: Sequence[Fold], entry: Entry
) -> None:
    """Raise `PluginError`, which names the plugin, if the plugins' decisions differ from the log."""
    if not plugins:
        return
    if version != entry.version or len(folds) != len(entry.folds):
        _raise(
            plugins, ("staleness", "aggregate", "monitor", "warm_up.aggregate"), number, "which updates to fold"
        )
    for fold, written in zip(folds, entry.folds, strict=False):
        if not _are_same(fold.weights, written.weights):
            _raise(plugins, ("aggregate", "warm_up.aggregate", "staleness"), number, "the weights of updates")
        for place, (scalars, known) in enumerate(zip(fold.plan, written.plan, strict=False)):
            if not _are_same(scalars, known):
                _raise(plugins, (f"optimizer[{place}]",), number, "the scalars of a step")


def check_state(core: HubCore, model: HubModel, saved_core: HubCore, saved_model: HubModel, number: int) -> None:
    """Raise `PluginError`, which names the plugin, if a replay differs from a checkpoint."""
    plugins = plugins_of(core.policy_engine.policy)
    if not plugins:
        return
    engine, saved = core.policy_engine.state, saved_core.policy_engine.state
    paced = [_paces(one) for one in (core, saved_core)]
    if paced[0] != paced[1] or _written(engine.cadence) != _written(saved.cadence):
        _raise(plugins, ("frequency", "warm_up.frequency"), number, "the local steps of devices")
    alarming = [
        [_written(of.devices, list(of.fleet.values())), repr(of.causes)]
        for of in (engine.divergence, saved.divergence)
    ]
    if alarming[0] != alarming[1]:
        _raise(plugins, ("monitor",), number, "the alarms")
    if model.current.vector.tobytes() != saved_model.current.vector.tobytes():
        _raise(plugins, ("combine", "optimizer"), number, "the values of the model")


def _paces(core: HubCore) -> list[tuple[str, int, str]]:
    return [
        (one.device_id, one.measurements.assigned_steps, one.measurements.why)
        for one in core.members.members.values()
    ]


def _written(*values: object) -> str:
    return repr(msgspec.to_builtins(values))


def _raise(plugins: dict[str, object], paths: Sequence[str], number: int, what: str) -> None:
    """Raise `PluginError` for the plugins at these paths, if there are any."""
    found = [
        f"policy.{path} {plugin_name(part)}" for path, part in plugins.items() if path.startswith(tuple(paths))
    ]
    if found:
        raise PluginError(
            f"entry {number} of the journal: {' or '.join(found)} decides {what} differently now than in the run; "
            f"{REMEDY}"
        )


def _are_same(scalars: Sequence[float], known: Sequence[float]) -> bool:
    return len(scalars) == len(known) and all(
        math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-12)
        for one, other in zip(scalars, known, strict=True)
    )
