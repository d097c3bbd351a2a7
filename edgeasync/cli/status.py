"""`edgeasync status`."""

from typing import Any

from rich.console import Console
from rich.table import Table

from edgeasync.cli.output import Printer
from edgeasync.runtime.status import fetch_status


def print_status(address: str, timeout_s: float, printer: Printer) -> None:
    """Ask the hub and print what it says."""
    status = fetch_status(address, timeout_s)
    if printer.json:
        printer.object(status)
        return
    console = Console()
    console.print(
        f"hub {status['address']} (pid {status['pid']}), lineage {status['lineage']}, version {status['version']}"
    )
    console.print(
        f"updates: {status['updates_applied']} applied, {status['updates_rejected']} rejected, "
        f"{status['duplicates']} duplicates; messages refused: {status['messages_refused']}"
    )
    console.print(device_table(status["devices"]))


def device_table(devices: list[dict[str, Any]], pids: dict[str, int] | None = None) -> Table:
    """Return a table of the devices, with process ids where they are known."""
    columns = ["device", "state", "seen", "updates", "stale", "steps", "ex/s", "loss"]
    if pids is not None:
        columns.insert(1, "pid")
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("device", "state") else "right", no_wrap=True)
    for device in devices:
        cells = [
            device["id"],
            device["state"],
            f"{device['last_seen_s']:.1f} s",
            str(device["updates_applied"]),
            str(device["staleness"]),
            str(device["local_steps"]),
            f"{device['examples_per_s']:.0f}",
            "" if device["loss"] is None else f"{device['loss']:.3g}",
        ]
        if pids is not None:
            cells.insert(1, str(pids.get(device["id"], "")))
        table.add_row(*cells)
    return table
