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
    "alert": "nothing is changed",
    "probation": "its updates count as short ones",
    "excluded": "an operator has excluded it",
    "increase_frequency": "intervals are halved",
    "reduce_lr": "the hub's learning rate is halved",
    "reduce_local_lr": "the devices' learning rates are halved",
    "rollback": "went back to a calm model, at half the hub's learning rate",
}

DENIALS = {
    "hub_key": "for another hub's key",
    "plain": "without encryption",
    "protocol": "with a broken handshake",
    "revoked": "under a revoked key",
    "routing_id": "with a routing id of their own",
    "token": "by a token that was used or has expired",
    "unfinished": "with an unfinished handshake",
    "unknown_key": "under an unknown key",
}

PIPE_WIDTH = 10_000
"""Of what is no terminal: its reader takes each device's line as a whole."""

LOSSES_CALM = 0.1
"""A device that loses no more than this share of its updates, or of their length, is not worth a line."""

BOUNDS = {
    "change": "steps at most double or halve from one answer to the next",
    "device": "the devices' own local_steps_max holds",
    "epochs_max": "epochs_max holds",
    "local_steps_max": "local_steps_max holds",
    "local_steps_min": "local_steps_min holds",
}


def print_status(status: dict[str, Any], address: str, printer: Printer) -> None:
    """Print what the hub at an address says."""
    if printer.json:
        printer.object(status)
        return
    try:
        described = describe_status(status)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(
            f"what answers at {address} is not an edgeasync hub of this version (its status cannot be read); "
            "check the address"
        ) from error
    print_whole(described, Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH))


def print_whole(described: RenderableType, console: Console) -> None:
    """Print without cutting at the width of the console: a terminal wraps what is too long for it."""
    needed = console.measure(described, options=console.options.update_width(PIPE_WIDTH)).minimum
    console.width = max(console.width, needed)
    console.print(described, crop=False)


def describe_status(status: Mapping[str, Any]) -> RenderableType:
    """Return a status for people: totals, what the hub thinks of the fleet, the devices and their intervals."""
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
    """Return a table of the devices: with their process ids where these are known, or else with their traffic."""
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
    """Return a table of the devices' intervals: the local steps they were given, their times, and the reason."""
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
    """Return a table of cells; what a peer wrote is not markup.

    Two columns have `words`, the last of which may be wrapped. No column is narrower than what it holds, or than a
    word of it where the words may be wrapped.
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
    """Return how long a device rests, if it does, and why it was given its steps, if it was given any."""
    resting = f"rests for {_seconds(rest_s)}" if (rest_s := device.get("rest_s", 0.0)) else ""
    return "; ".join(filter(None, (resting, device.get("why", ""))))


def _state(device: Mapping[str, Any]) -> str:
    """Return a device's state, and why it does not train at full pace if it says so."""
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
        yield "not let in: " + ", ".join(f"{count} {DENIALS.get(why, why)}" for why, count in denied.items())
    if trouble := status.get("disk_trouble"):
        cost = "no update is taken until it can be"
        if status.get("durability") == "checkpoint":
            cost = "training continues; if the hub crashes, what came after the last checkpoint is lost"
        yield f"the run's folder cannot be written: {trouble}; {cost}"
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
    """Return how often the fleet exchanges, and what is less than set."""
    words = f"period {_seconds(cadence['period_s'])}" if cadence["period_s"] else "no period yet"
    if bound := cadence.get("bound"):
        words += f", not the {_seconds(cadence['aim_s'])} aimed at: {BOUNDS.get(bound, bound)}"
    if cadence["gain"] < 1.0:
        words += f", shortened to {cadence['gain']:.0%}: {cadence['cause']}"
    if cadence.get("resting"):
        still = f"the model has stood still for {_seconds(cadence['still_s'])}"
        words += f"; resting: {still}, exchanges every {_seconds(cadence['rest_period_s'])}"
    elif cause := cadence.get("rest_cause"):
        words += f"; awake: {cause}"
    if cadence["warming_up"]:
        words += "; warming up"
    if learning_rate_factor != 1.0:
        words += f"; the hub's learning rate is at {learning_rate_factor:.3g} of what was set"
    return f"fleet: {words}"


def _alarm(alarm: Mapping[str, Any]) -> str:
    remedy, device = alarm["remedy"], alarm["device"]
    act = f"'edgeasync device quarantine {device}' excludes it" if device and remedy == "alert" else ""
    lasts = f"for {_seconds(alarm['since_s'])}"
    return f"alarm: {device or 'fleet'}, {lasts}: {alarm['cause']}; {act or REMEDIES.get(remedy, remedy)}"


def _losses(device: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line if a device counts for much less than it might."""
    rejected = device.get("updates_rejected") or {}
    count, kept = sum(rejected.values()), device.get("weight_kept")
    if count > LOSSES_CALM * (count + device["updates_applied"]):
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(rejected.items()))
        yield f"{device['id']}: {count} of {count + device['updates_applied']} updates rejected: {reasons}"
    if kept is not None and kept < 1.0 - LOSSES_CALM:
        yield f"{device['id']}: its updates are long and were shortened: they counted for {kept:.0%}"


def _evaluation(evaluated: Mapping[str, Any]) -> str:
    words = f"version {evaluated['version']}"
    if evaluated["loss"] is not None:
        words += f", loss {evaluated['loss']:.4g}"
    if evaluated["accuracy"] is not None:
        words += f", accuracy {evaluated['accuracy']:.2%}"
    return words


def in_bytes(count: float) -> str:
    """Write a number of bytes with two or three digits that mean something."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000.0
    return f"{count:.3g} TB"


def _traffic(device: Mapping[str, Any]) -> str:
    """Return a device's bytes, and those left for the day if it has a limit."""
    if "bytes_up" not in device:
        return ""
    total = in_bytes(device["bytes_up"] + device["bytes_down"])
    left_bytes = device.get("day_left_bytes")
    return total if left_bytes is None else f"{total}, {in_bytes(left_bytes)} left today"


def _seconds(seconds: float) -> str:
    if seconds >= 100.0:
        return f"{seconds:.0f} s"
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"
