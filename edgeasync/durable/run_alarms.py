"""Compute the alarms of a run, with begin and end, from its journal."""

from contextlib import closing
from pathlib import Path

import msgspec

from edgeasync.core.hub.divergence import DivergenceState
from edgeasync.durable.run_events import Line
from edgeasync.durable.run_replay import RunReplay


class RunAlarm(msgspec.Struct, frozen=True, kw_only=True):
    """An alarm of a run. Times are the hub's, as in the other lines of a replay."""

    device: str
    """the device; empty: the fleet"""
    cause: str
    """human-readable cause"""
    begin_s: float
    """when it began"""
    end_s: float | None
    """when it ended; null while it is active"""


def list_alarms(
    run: Path, *, until: int | None = None, checkpoint: str | None = None, trust_code: bool = False
) -> list[RunAlarm]:
    """Return the alarms of a run in the order of their begin; see `RunReplay` for the arguments.

    They include the alarms that the checkpoint at the begin of the replay contains: the active
    ones, and the latest ended ones.
    """
    found: dict[tuple[str, float], RunAlarm] = {}
    with closing(RunReplay(run, until=until, checkpoint=checkpoint, trust_code=trust_code)) as replay:

        def on_line(_: Line) -> bool:
            _collect(replay.core.policy_engine.state.divergence, found)
            return True

        replay.tell(on_line)
        _collect(replay.core.policy_engine.state.divergence, found)
    return sorted(found.values(), key=lambda alarm: (alarm.begin_s, alarm.device))


def _collect(state: DivergenceState, found: dict[tuple[str, float], RunAlarm]) -> None:
    """Add the alarms in a state to those found before it."""
    for past in state.past:
        key = past.device_id, past.begun_s
        found[key] = RunAlarm(device=past.device_id, cause=past.words, begin_s=past.begun_s, end_s=past.ended_s)
    for active in (*state.fleet.values(), *state.devices.values()):
        key = active.device_id, active.begun_s
        found[key] = RunAlarm(device=active.device_id, cause=active.words, begin_s=active.begun_s, end_s=None)
