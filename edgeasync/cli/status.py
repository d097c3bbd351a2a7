"""`edgeasync status`."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from edgeasync.cli.output import Printer, visible
from edgeasync.errors import ProtocolError

REMEDIES = {
    "alert": "nothing was changed",
    "probation": "its updates have limited weight",
    "excluded": "excluded by an operator",
    "increase_frequency": "intervals were halved",
    "reduce_lr": "the hub's learning rate was halved",
    "reduce_local_lr": "the devices' learning rates were halved",
    "rollback": "rolled back to an earlier model, at half the hub's learning rate",
}

DENIALS = {
    "hub_key": "with the wrong hub key",
    "plain": "without encryption",
    "protocol": "with a broken handshake",
    "revoked": "with a revoked key",
    "routing_id": "with a custom routing id",
    "token": "with a used or expired token",
    "unfinished": "with an unfinished handshake",
    "unknown_key": "with an unknown key",
}

PIPE_WIDTH = 10_000
"""Output width if standard output is not a terminal; scripts expect each device on one line."""

LOSSES_CALM = 0.1
"""A device is listed if the hub rejects more than this fraction of its updates, or if clipping
removes more than this fraction of their length.
"""

BOUNDS = {
    "change": "local steps at most double or halve per assignment",
    "device": "limited by the devices' local_steps_max",
    "epochs_max": "limited by epochs_max",
    "local_steps_max": "limited by local_steps_max",
    "local_steps_min": "limited by local_steps_min",
}


def print_status(status: dict[str, Any], address: str, printer: Printer) -> None:
    """Print the status that a hub at an address returned."""
    if printer.json:
        printer.object(status)
        return
    try:
        described = describe_status(status)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(
            f"{address}: not an edgeasync hub of this version; check the address and the hub's version"
        ) from error
    print_whole(described, Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH))


def print_whole(described: RenderableType, console: Console) -> None:
    """Print without truncation; a terminal wraps lines that exceed its width."""
    needed = console.measure(described, options=console.options.update_width(PIPE_WIDTH)).minimum
    console.width = max(console.width, needed)
    console.print(described, crop=False)


def describe_status(status: Mapping[str, Any]) -> RenderableType:
    """Return a status as text: totals, alarms, the devices and their intervals."""
    devices = status["devices"]
    parts: list[RenderableType] = [Text(visible(line)) for line in _totals(status)]
    alarms = status.get("alarms", [])
    parts += [Text(visible(_alarm(alarm)), style="bold") for alarm in alarms]
    parts += [Text(visible(line)) for device in devices for line in _losses(device)]
    parts.append(device_table(devices))
    if any(map(_reason, devices)):
        parts += [Text(), interval_table(devices)]
    return Group(*parts)


def device_table(devices: list[dict[str, Any]], pids: dict[str, int] | None = None) -> Table:
    """Return a table of the devices. The last column shows `pids` or, without these, the traffic."""
    columns = ("device", "state", "seen", "updates", "stale", "steps", "ex/s", "loss")
    rows = [
        (
            device["id"],
            _state(device),
            f"{device['last_seen_s']:.1f} s",
            str(device["updates_applied"]),
            str(device["staleness"]),
            str(device["local_steps"]),
            f"{device['examples_per_s']:.0f}",
            "" if device["loss"] is None else f"{device['loss']:.3g}",
            _traffic(device) if pids is None else str(pids.get(device["id"], "")),
        )
        for device in devices
    ]
    return _table((*columns, "traffic" if pids is None else "pid"), rows, words=("device", "state"))


def interval_table(devices: list[dict[str, Any]]) -> Table:
    """Return a table of the devices' assigned local steps, step times, periods, and the reasons."""
    rows = [
        (
            device["id"],
            str(device["assigned_steps"]),
            _seconds(device["step_s"]),
            _seconds(device["period_s"]),
            f"{device['talk_share']:.0%}",
            f"sends {codec}; {why}" if (codec := device.get("push_codec")) else why,
        )
        for device in devices
        if (why := _reason(device))
    ]
    return _table(("device", "next steps", "a step", "period", "talking", "why"), rows, words=("device", "why"))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], words: tuple[str, str]) -> Table:
    """Return a table of cells, without interpreting markup in them.

    `words` names the two columns that contain text; the second of them may be wrapped. It is at
    least as wide as its longest word, and every other column is at least as wide as its widest
    cell.
    """
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    shown = [[visible(cell) for cell in row] for row in rows]
    for place, column in enumerate(columns):
        wrapped, cells = column == words[-1], [column, *(row[place] for row in shown)]
        pieces = [word for cell in cells for word in cell.split()] if wrapped else cells
        table.add_column(
            column,
            justify="left" if column in words else "right",
            no_wrap=not wrapped,
            overflow="fold",
            min_width=max(map(len, pieces)),
        )
    for row in shown:
        table.add_row(*map(Text, row))
    return table


def _reason(device: Mapping[str, Any]) -> str:
    """Return how long a device must wait before an exchange, and why the hub chose its number of local steps."""
    resting = f"rests for {_seconds(rest_s)}" if (rest_s := device.get("rest_s", 0.0)) else ""
    return "; ".join(filter(None, (resting, device.get("why", ""))))


def _state(device: Mapping[str, Any]) -> str:
    """Return a device's state, and why it trains at a reduced pace if it does."""
    reason, percent = device.get("pace_reason", ""), device.get("pace_percent", 100)
    if percent == 0:
        return f"{device['state']}: {reason}"
    slowed = ", ".join(filter(None, (f"{percent} %" if percent < 100 else "", reason)))
    return f"{device['state']} at {slowed}" if slowed else str(device["state"])


def _totals(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines above the tables."""
    place = f"hub {status['address']} (pid {status['pid']})"
    durable = status.get("version_durable")
    on_disk = "" if durable is None else f" ({durable} on disk)"
    yield f"{place}, lineage {status['lineage']}, version {status['version']}{on_disk}"
    rollbacks = f", {times} rollbacks" if (times := status.get("rollbacks")) else ""
    yield (
        f"updates: {status['updates_applied']} applied, {status['updates_rejected']} rejected, "
        f"{status['duplicates']} duplicates{rollbacks}; messages refused: {status['messages_refused']}"
    )
    if denied := status.get("denied"):
        yield "connections refused: " + ", ".join(
            f"{count} {DENIALS.get(why, why)}" for why, count in denied.items()
        )
    if trouble := status.get("disk_trouble"):
        cost = "the hub accepts no updates until it can write again"
        if status.get("durability") == "checkpoint":
            cost = "training continues, but a crash of the hub loses everything after the last checkpoint"
        yield f"cannot write the run's folder: {trouble}; {cost}"
    if (cadence := status.get("cadence")) is not None:
        yield _cadence(cadence, status.get("learning_rate_factor", 1.0))
    traffic = status.get("traffic", {})
    if (left_bytes := traffic.get("day_left_bytes")) is not None:
        yield f"today: {in_bytes(left_bytes)} left of {in_bytes(traffic['bytes_per_day_max'])} for all devices"
    if (last := status.get("evaluation")) is not None:
        yield f"evaluation: {_evaluation(last)}"
    if (best := status.get("best")) is not None and best != last:
        yield f"best: {_evaluation(best)}"


def _cadence(cadence: Mapping[str, Any], learning_rate_factor: float) -> str:
    """Return a line about the fleet's exchange period, and the hub's learning rate if it is reduced."""
    words = f"period {_seconds(cadence['period_s'])}" if cadence["period_s"] else "no period yet"
    if bound := cadence.get("bound"):
        words += f", target {_seconds(cadence['aim_s'])}: {BOUNDS.get(bound, bound)}"
    if cadence["gain"] < 1.0:
        words += f", shortened to {cadence['gain']:.0%}: {cadence['cause']}"
    if cadence.get("resting"):
        still = f"no progress for {_seconds(cadence['still_s'])}"
        words += f"; idle: {still}, exchanges every {_seconds(cadence['rest_period_s'])}"
    elif cause := cadence.get("rest_cause"):
        words += f"; awake: {cause}"
    if cadence["warming_up"]:
        words += "; warming up"
    if learning_rate_factor != 1.0:
        words += f"; the hub's learning rate is reduced to {learning_rate_factor:.3g} of its setting"
    return f"fleet: {words}"


def _alarm(alarm: Mapping[str, Any]) -> str:
    remedy, device = alarm["remedy"], alarm["device"]
    act = f"'edgeasync device quarantine {device}' excludes it" if device and remedy == "alert" else ""
    lasts = f"for {_seconds(alarm['since_s'])}"
    return f"alarm: {device or 'fleet'}, {lasts}: {alarm['cause']}; {act or REMEDIES.get(remedy, remedy)}"


def _losses(device: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about a device, if the hub rejects many of its updates or clips them strongly."""
    rejected = device.get("updates_rejected") or {}
    count, kept = sum(rejected.values()), device.get("weight_kept")
    if count > LOSSES_CALM * (count + device["updates_applied"]):
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(rejected.items()))
        yield f"{device['id']}: {count} of {count + device['updates_applied']} updates rejected: {reasons}"
    if kept is not None and kept < 1.0 - LOSSES_CALM:
        yield f"{device['id']}: its updates were clipped; {kept:.0%} of their length counted"


def _evaluation(evaluated: Mapping[str, Any]) -> str:
    words = f"version {evaluated['version']}"
    if evaluated["loss"] is not None:
        words += f", loss {evaluated['loss']:.4g}"
    if evaluated["accuracy"] is not None:
        words += f", accuracy {evaluated['accuracy']:.2%}"
    return words


def in_bytes(count: float) -> str:
    """Format a number of bytes with a unit and three significant digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000.0
    return f"{count:.3g} TB"


def _traffic(device: Mapping[str, Any]) -> str:
    """Return a device's traffic, and its remaining daily quota if it has one."""
    if "bytes_up" not in device:
        return ""
    total = in_bytes(device["bytes_up"] + device["bytes_down"])
    left_bytes = device.get("day_left_bytes")
    return total if left_bytes is None else f"{total}, {in_bytes(left_bytes)} left today"


def _seconds(seconds: float) -> str:
    if seconds >= 100.0:
        return f"{seconds:.0f} s"
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"
