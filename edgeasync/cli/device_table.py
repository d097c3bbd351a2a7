"""Tables of devices for a terminal."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from rich.table import Table
from rich.text import Text

from edgeasync.cli.output import visible
from edgeasync.core.hub.device_words import in_bytes, seconds, state_words
from edgeasync.protocol.status import DeviceStatus

SortKey = Literal["name", "state", "seen", "updates", "stale", "speed", "loss", "period", "talk", "traffic"]
SORT_KEYS: tuple[SortKey, ...] = get_args(SortKey)

_SORTS: dict[SortKey, Callable[[DeviceStatus], Any]] = {
    "name": lambda device: device.id,
    "state": lambda device: device.state,
    "seen": lambda device: -device.last_seen_s,
    "updates": lambda device: device.updates_applied,
    "stale": lambda device: -device.staleness,
    "speed": lambda device: device.examples_per_s,
    "loss": lambda device: (device.loss is not None, -(device.loss or 0.0)),
    "period": lambda device: -device.period_s,
    "talk": lambda device: -device.talk_share,
    "traffic": lambda device: -(device.bytes_up + device.bytes_down),
}
"""How to sort devices by each key, the worst first."""

_COLUMNS = ("device", "state", "seen", "updates", "stale", "ex/s", "loss", "period", "talk")


def sort_devices(devices: Iterable[DeviceStatus], key: SortKey) -> list[DeviceStatus]:
    """Return the devices sorted by a key, the worst first."""
    return sorted(devices, key=_SORTS[key])


def device_table(devices: Sequence[DeviceStatus], pids: Mapping[str, int] | None = None) -> Table:
    """Return a table of devices. The last column shows `pids` or, without these, the traffic."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    rows = [[visible(cell) for cell in _row(device, pids)] for device in devices]
    for place, column in enumerate((*_COLUMNS, "traffic" if pids is None else "pid")):
        wrapped, cells = column == "state", [column, *(row[place] for row in rows)]
        pieces = [word for cell in cells for word in cell.split()] if wrapped else cells
        table.add_column(
            column,
            justify="left" if column in ("device", "state") else "right",
            no_wrap=not wrapped,
            overflow="fold",
            min_width=max(map(len, pieces)),  # so that no name and no number is cut
        )
    for row in rows:
        table.add_row(*map(Text, row))  # a `Text` is not interpreted as markup
    return table


def _row(device: DeviceStatus, pids: Mapping[str, int] | None) -> tuple[str, ...]:
    return (
        device.id,
        state_words(device),
        f"{device.last_seen_s:.1f} s",
        str(device.updates_applied),
        str(device.staleness),
        f"{device.examples_per_s:.0f}",
        "" if device.loss is None else f"{device.loss:.3g}",
        seconds(device.period_s),
        f"{device.talk_share:.0%}",
        _traffic(device) if pids is None else str(pids.get(device.id, "")),
    )


def _traffic(device: DeviceStatus) -> str:
    """Return a device's traffic, and its remaining daily quota if it has one."""
    total = in_bytes(device.bytes_up + device.bytes_down)
    return total if device.day_left_bytes is None else f"{total}, {in_bytes(device.day_left_bytes)} left today"
