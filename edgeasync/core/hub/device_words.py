"""All that is known about a device, in words, for the terminal and the page."""

from collections.abc import Iterator

from edgeasync.core.hub.attention import duration
from edgeasync.protocol.status import DeviceStatus


def device_lines(device: DeviceStatus) -> Iterator[tuple[str, str]]:
    """Yield all that is known about a device, as names and values."""
    yield "state", state_words(device)
    if device.quarantine is not None:
        yield "quarantine", f"{device.quarantine.cause}; ends {device.quarantine.ends}"
    yield from _presence(device)
    yield "machine", ", ".join(filter(None, (device.machine, device.software))) or "unknown"
    if device.temperature_c is not None:
        yield "temperature", f"{device.temperature_c:.0f} C"
    rejected = ", ".join(f"{count} {reason}" for reason, count in sorted(device.updates_rejected.items()))
    counts = f"{device.updates_applied} applied, {device.updates_buffered} buffered, {device.duplicates} repeated"
    yield "updates", counts + (f", rejected: {rejected}" if rejected else "")
    if device.weight_kept is not None and device.weight_kept < 0.995:
        yield "clipping", f"{device.weight_kept:.0%} of their length counted"
    yield "last update", f"{device.local_steps} steps, staleness {device.staleness}, {_loss(device)}"
    why = f": {device.why}" if device.why else ""
    yield "next update", f"{device.assigned_steps} steps{why}" if device.assigned_steps else "not assigned yet"
    if device.rest_s:
        yield "rests", f"for {seconds(device.rest_s)}"
    yield "speed", f"{device.examples_per_s:.0f} examples/s, {seconds(device.step_s)} a step"
    talk = f"communicates for {seconds(device.talk_s)}, {device.talk_share:.0%}"
    yield "period", f"{seconds(device.period_s)} between updates, {talk}"
    rate = (
        f"{in_bytes(device.bandwidth_bytes_per_s)}/s" if device.bandwidth_bytes_per_s else "rate not measured yet"
    )
    yield "link", f"{rate}, round trip {seconds(device.round_trip_s)}, sends {device.push_codec}"
    yield "traffic", f"{in_bytes(device.bytes_up)} up, {in_bytes(device.bytes_down)} down, {_day(device)}"


def _presence(device: DeviceStatus) -> Iterator[tuple[str, str]]:
    """Yield since when a device is connected and from where, or why it left, and its last error."""
    if device.why_left:
        yield "left", device.why_left
    yield "last seen", f"{duration(device.last_seen_s)} ago"
    if device.joined_s is not None:
        yield "joined", f"{duration(device.joined_s)} ago"
    if device.stalled_s:
        yield "last step", f"{duration(device.stalled_s)} ago"
    if device.last_error_s is not None:
        yield "last error", f"{duration(device.last_error_s)} ago: {device.last_error}"
    if device.address:
        yield "address", device.address
    if device.clock_offset_s is not None:
        yield "clock", _clock(device.clock_offset_s)


def state_words(device: DeviceStatus) -> str:
    """Return a device's state, and why it trains at a reduced pace if it does."""
    if device.pace_percent == 0:
        return f"{device.state}: {device.pace_reason}"
    percent = f"{device.pace_percent} %" if device.pace_percent < 100 else ""
    slowed = ", ".join(filter(None, (percent, device.pace_reason)))
    return f"{device.state} at {slowed}" if slowed else str(device.state)


def _clock(offset_s: float) -> str:
    """Return by how much a device's clock differs from the hub's."""
    if abs(offset_s) < 1.0:
        return "as the hub's"
    return f"{duration(abs(offset_s))} {'ahead of' if offset_s > 0.0 else 'behind'} the hub's"


def _loss(device: DeviceStatus) -> str:
    return "no loss" if device.loss is None else f"loss {device.loss:.4g}"


def _day(device: DeviceStatus) -> str:
    left_bytes = device.day_left_bytes
    left = "" if left_bytes is None else f", {in_bytes(left_bytes)} left"
    return f"{in_bytes(device.day_bytes)} today{left}"


def in_bytes(count: float) -> str:
    """Format a number of bytes with a unit and three significant digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000.0
    return f"{count:.3g} TB"


def seconds(value: float) -> str:
    """Format a measured time in seconds or milliseconds."""
    if value >= 100.0:
        return f"{value:.0f} s"
    return f"{value:.2f} s" if value >= 1.0 else f"{1e3 * value:.3g} ms"
