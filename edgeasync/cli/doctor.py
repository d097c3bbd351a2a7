"""`edgeasync doctor`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from edgeasync.cli.device import read_settings, state_folder
from edgeasync.cli.output import Printer
from edgeasync.cli.settings_flags import Flags
from edgeasync.config import to_table
from edgeasync.errors import UnfitError
from edgeasync.host.readings import Readings
from edgeasync.ops.doctor.examine import examine
from edgeasync.ops.doctor.finding import Finding
from edgeasync.runtime.agent_settings import AgentSettings
from edgeasync.runtime.profiles import with_profile


def run_doctor(config: Path | None, said: Flags, model: Path | None, root: Path, printer: Printer) -> None:
    """Print a line per check. Raises `UnfitError` if a check failed."""
    settings = read_settings(config, AgentSettings, said)
    section, _ = with_profile(settings.agent, Readings(root))
    folder = state_folder(section)
    failed = []
    with _errors_only():
        for finding in examine(
            replace(settings, agent=replace(section, state=str(folder))), folder, model or settings.model, root
        ):
            _print(finding, printer)
            if finding.level == "fail":
                failed.append(finding.name)
    if failed:
        raise UnfitError(f"this device cannot train yet: {', '.join(failed)}; follow the remedies in those lines")


@contextmanager
def _errors_only() -> Iterator[None]:
    """Keep warnings out of the log. The doctor prints its own line if an execution provider fails."""
    log = logging.getLogger("edgeasync")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _print(finding: Finding, printer: Printer) -> None:
    words = "; ".join(filter(None, (finding.detail, finding.cure)))
    printer.result(to_table(finding), f"{finding.level:<5} {finding.name:<12} {words}")
