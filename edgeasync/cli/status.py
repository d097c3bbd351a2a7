"""`edgeasync status`: the hub's counts, the devices that need attention, and a table of devices."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from edgeasync.cli.device_table import SORT_KEYS, SortKey, device_table, sort_devices
from edgeasync.cli.options import one_of
from edgeasync.cli.output import Printer, visible
from edgeasync.config import suggest
from edgeasync.core.hub.attention import find_attention
from edgeasync.core.hub.device_words import device_lines, in_bytes, seconds
from edgeasync.core.hub.fleet_words import denied_words, find_notices
from edgeasync.errors import ConfigError, ProtocolError
from edgeasync.host.wall_clock import written
from edgeasync.protocol.feed import Attention
from edgeasync.protocol.status import (
    CadenceStatus,
    DeviceStatus,
    EvaluationStatus,
    HubStatus,
    RecentEvent,
    read_status,
)

PIPE_WIDTH = 10_000
"""Output width if standard output is not a terminal; scripts expect each device on one line."""

PIPE_HEIGHT = 50
"""Number of lines to fill if standard output is not a terminal."""

LISTED_MIN, ROWS_MIN = 5, 3
"""Minimum number of rows of a shortened list, and of a shortened table, which begins with the same devices."""

EVENTS_SHOWN = 10
"""Number of latest events to show of a single device."""

BOUNDS = {
    "change": "local steps at most double or halve per assignment",
    "device": "limited by the devices' local_steps_max",
    "epochs_max": "limited by epochs_max",
    "local_steps_max": "limited by local_steps_max",
    "local_steps_min": "limited by local_steps_min",
}

STATES = ("training", "joining", "paused", "lost", "left", "quarantined")


class View(NamedTuple):
    """What to show of the devices.

    - `sort`: the order of the table; by default, devices that need attention come first.
    - `state`: show only devices in this state.
    - `device`: show everything about this device instead.
    - `whole`: show all devices, even if they do not fit the terminal.
    """

    sort: SortKey | None = None
    state: str | None = None
    device: str | None = None
    whole: bool = False


def view_of(device: str | None, state: str | None, sort: str | None, *, whole: bool, json: bool) -> View:
    """Return the view that flags select. Raises `ConfigError`."""
    view = View(
        sort=None if sort is None else one_of("--sort", sort, SORT_KEYS),
        state=None if state is None else one_of("--state", state, STATES),
        device=device,
        whole=whole,
    )
    if json and view != View():
        raise ConfigError("--json prints the whole status; remove --device, --state, --sort and --all")
    return view


def print_status(
    status: dict[str, Any],
    address: str,
    printer: Printer,
    view: View | None = None,
    events: Sequence[RecentEvent] = (),
) -> None:
    """Print the status that a hub at an address returned; `events` are shown of a single device."""
    if printer.json:
        printer.object(status)
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    height = console.height if sys.stdout.isatty() else PIPE_HEIGHT
    described = describe_status(parse_status(status, address), view or View(), console, height, events)
    print_whole(described, console)


def parse_status(status: dict[str, Any], address: str) -> HubStatus:
    """Parse the status of the hub at an address; raises `ProtocolError`."""
    try:
        return read_status(status)
    except ValueError as error:
        raise ProtocolError(
            f"{address}: not an edgeasync hub of this version; check the address and the hub's version"
        ) from error


def print_whole(described: RenderableType, console: Console) -> None:
    """Print without truncation; a terminal wraps lines that exceed its width."""
    needed = console.measure(described, options=console.options.update_width(PIPE_WIDTH)).minimum
    console.width = max(console.width, needed)
    console.print(described, crop=False)


def describe_status(
    status: HubStatus, view: View, console: Console, height: int, events: Sequence[RecentEvent] = ()
) -> RenderableType:
    """Return a status as text: totals, the fleet's alarms, devices that need attention, a table.

    List and table are shortened to `height` lines, unless the view is `whole`. Raises `ConfigError`
    if the hub does not know the device of the view.
    """
    attention = find_attention(status)
    if view.device is not None:
        return _one_device(status, view.device, attention, events)
    parts: list[RenderableType] = [Text(visible(line)) for line in _totals(status)]
    parts += [Text(visible(one.words), style="bold" if one.level == "bad" else "") for one in find_notices(status)]
    rows = _select(status.devices, attention, view)
    if attention and view.state is None:
        free = len(attention) if view.whole else max(LISTED_MIN, (height - len(parts)) // 2 - 2)
        parts += [Text(), Text(f"needs attention: {len(attention)}", style="bold"), _list(attention[:free])]
        parts += _rest(len(attention) - free)
        if any(one.reason == "warned" for one in attention):
            parts.append(Text("to exclude a device with a warning: edgeasync device quarantine NAME"))
    if rows:
        used = len(console.render_lines(Group(*parts), pad=False))
        free = len(rows) if view.whole else max(ROWS_MIN, height - used - 4)
        parts += [Text(), device_table(rows[:free]), *_rest(len(rows) - free)]
    return Group(*parts)


def _select(devices: Sequence[DeviceStatus], attention: Sequence[Attention], view: View) -> list[DeviceStatus]:
    chosen = [device for device in devices if view.state in (None, device.state)]
    if view.sort is not None:
        return sort_devices(chosen, view.sort)
    urgency = {one.device: place for place, one in enumerate(attention)}
    return sorted(chosen, key=lambda device: (urgency.get(device.id, len(urgency)), device.id))


def _rest(count: int) -> list[RenderableType]:
    return [Text(f"and {count} more; --all shows all")] if count > 0 else []


def _list(attention: Sequence[Attention]) -> Table:
    """Return a table of devices and what is wrong with them."""
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True, min_width=max(len(visible(one.device)) for one in attention))
    table.add_column(overflow="fold")
    for one in attention:
        table.add_row(Text(visible(one.device)), Text(visible(one.words)))
    return table


def _one_device(
    status: HubStatus, name: str, attention: Sequence[Attention], events: Sequence[RecentEvent]
) -> RenderableType:
    """Return everything about one device. Raises `ConfigError` if the hub does not know it."""
    devices = {device.id: device for device in status.devices}
    lines = [("device", name), *(("attention", one.words) for one in attention if one.device == name)]
    if name in devices:
        lines += device_lines(devices[name])
    elif name not in (*status.enrolled_unseen, *status.refused):
        advice = suggest(name, devices) or "list the hub's devices with 'edgeasync status --all'"
        raise ConfigError(f"--device {name}: the hub knows no such device; {advice}")
    lines += [
        ("past alarm", f"{seconds(past.ended_ago_s)} ago, for {seconds(past.duration_s)}: {past.cause}")
        for past in status.alarms_past
        if past.device == name
    ]
    own = [event for event in events if event.device == name][-EVENTS_SHOWN:]
    lines += [(event.event, f"{written(event.time)} {event.detail}") for event in own]
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, words in lines:
        table.add_row(Text(visible(key), style="bold"), Text(visible(words)))
    return table


def _totals(status: HubStatus) -> Iterator[str]:
    """Yield the lines about the hub and the whole fleet."""
    on_disk = "" if status.version_durable is None else f" ({status.version_durable} on disk)"
    place = f"hub {status.address} (pid {status.pid})"
    yield f"{place}, lineage {status.lineage}, version {status.version}{on_disk}"
    rollbacks = f", {status.rollbacks} rollbacks" if status.rollbacks else ""
    yield (
        f"updates: {status.updates_applied} applied, {status.updates_rejected} rejected, "
        f"{status.duplicates} duplicates{rollbacks}; messages refused: {status.messages_refused}"
    )
    if status.denied:
        yield f"connections refused: {denied_words(status.denied)}"
    yield _cadence(status.cadence)
    traffic = status.traffic
    if traffic.day_left_bytes is not None and traffic.bytes_per_day_max is not None:
        quota = in_bytes(traffic.bytes_per_day_max)
        yield f"today: {in_bytes(traffic.day_left_bytes)} left of {quota} for all devices"
    if status.evaluation is not None:
        yield f"evaluation: {_evaluation(status.evaluation)}"
    if status.best is not None and status.best != status.evaluation:
        yield f"best: {_evaluation(status.best)}"
    yield _counts(status)


def _counts(status: HubStatus) -> str:
    """Return how many devices are in each state."""
    counts = Counter[str](device.state for device in status.devices)
    parts = [f"{counts[state]} {state}" for state in STATES if counts[state]]
    if status.enrolled_unseen:
        parts.append(f"{len(status.enrolled_unseen)} never came")
    return f"devices: {', '.join(parts) or 'none'}"


def _cadence(cadence: CadenceStatus) -> str:
    """Return a line about the fleet's exchange period."""
    words = f"period {seconds(cadence.period_s)}" if cadence.period_s else "no period yet"
    if cadence.bound:
        words += f", target {seconds(cadence.aim_s)}: {BOUNDS.get(cadence.bound, cadence.bound)}"
    if cadence.gain < 1.0:
        words += f", shortened to {cadence.gain:.0%}: {cadence.cause}"
    if cadence.rest_cause and not cadence.resting:
        words += f"; awake: {cadence.rest_cause}"
    if cadence.warming_up:
        words += "; warming up"
    return f"fleet: {words}"


def _evaluation(evaluated: EvaluationStatus) -> str:
    words = f"version {evaluated.version}"
    if evaluated.loss is not None:
        words += f", loss {evaluated.loss:.4g}"
    if evaluated.accuracy is not None:
        words += f", accuracy {evaluated.accuracy:.2%}"
    return words
