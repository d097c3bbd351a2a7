"""`edgeasync hub`."""

from pathlib import Path
from typing import Any

import msgspec

from edgeasync.cli.output import Printer
from edgeasync.cli.service import serve
from edgeasync.config import convert, read_toml, to_table
from edgeasync.core.effects import Report
from edgeasync.runtime.settings import HubSection, HubSettings

PROGRESS_S = 10.0


def run_hub(config: Path, flags: dict[str, Any], printer: Printer) -> None:
    """Run a hub by a settings file; a flag wins over the file."""
    settings = read_toml(config, HubSettings)
    section = convert(to_table(settings.hub) | flags, HubSection, where="flags")
    settings = msgspec.structs.replace(settings, hub=section)

    def on_report(report: Report) -> None:
        printer.event(report.event, device=report.device_id, detail=report.detail)

    hub = settings.make_hub(on_report)
    seen = -1

    def on_progress() -> None:
        nonlocal seen
        core = hub.core
        if core.updates_applied == seen:
            return
        seen = core.updates_applied
        counts = {
            "version": core.version,
            "updates_applied": core.updates_applied,
            "devices_live": core.members.live_count,
        }
        if printer.json:
            printer.event("progress", **counts)
        else:
            detail = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in counts.items())
            printer.event("progress", detail=detail)

    reason = serve(hub, PROGRESS_S, on_progress)
    core = hub.core
    totals = {
        "reason": reason,
        "version": core.version,
        "updates_applied": core.updates_applied,
        "updates_rejected": core.updates_rejected,
        "duplicates": core.duplicates,
        "model": str(hub.model_file.resolve()),
    }
    if printer.json:
        printer.event("stopped", **totals)
    else:
        printer.event("stopped", detail=f"{reason}: version {core.version}, model in {totals['model']}")
