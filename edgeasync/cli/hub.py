"""`edgeasync hub`."""

import contextlib
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from edgeasync.cli.mistakes import check_settings_file
from edgeasync.cli.output import Printer, print_table
from edgeasync.cli.outputs import HubCheck, HubProgress, HubTotals
from edgeasync.cli.serving import serve
from edgeasync.cli.settings_flags import METRICS_FLAGS, PAGE_FLAGS, Flags, apply_flags, model_of, named_by_flag
from edgeasync.cli.under_systemd import find_notifier
from edgeasync.config import convert, expanded, read_toml
from edgeasync.core.hub.effects import HubReport
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.policy_engine import describe_evaluation
from edgeasync.durable.run_folder import RunFolder
from edgeasync.errors import AddressError, CapacityError, ConfigError, StorageError
from edgeasync.graphs.graph_model import HubGraph
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.host.host_info import memory_limit_bytes, prepare_for_service
from edgeasync.host.notify import Notifier
from edgeasync.net.address import is_within_machine
from edgeasync.net.connections import connections_that_fit
from edgeasync.ops.inspection import load_for_command
from edgeasync.plugins import refuse_modules_in
from edgeasync.runtime.hub import HubRuntime
from edgeasync.runtime.hub_record import own_model, read_record
from edgeasync.runtime.hub_settings import HubSection, HubSettings
from edgeasync.runtime.hub_start import make_hub
from edgeasync.runtime.page_settings import MetricsSection, PageSection, is_local
from edgeasync.web.beside import HubWithPage, prepare_page

if TYPE_CHECKING:
    from edgeasync.web.server import PagePlan

PROGRESS_S = 10.0

FILES_MAX = 1 << 17
"""Largest open-file limit to request. Some systems reserve memory for every allowed file."""


class Start(msgspec.Struct, frozen=True):
    """The arguments with which a hub starts: settings from flags, by table, and the run to resume.

    With `trust_code`, the hub may import code that is named only in the run's folder.
    """

    said: Flags
    resume: Path | None = None
    trust_code: bool = False

    def load(self, model: OnnxModel) -> HubGraph:
        """Load the hub's model, or that of the run to resume; raises what `load_for_command` raises."""
        return load_for_command(model if self.resume is None else own_model(model, self.resume))


def _all_settings(config: Path | None, start: Start) -> HubSettings:
    """Return the settings of the run to resume or, without one, the settings of a file.

    Flags override these settings, and may replace the file.
    """
    check_settings_file(config, {".onnx": "--model"})
    settings = _settings(config, start) if start.resume is None else _resumed(start.resume, config, start)
    section = apply_flags(settings.hub, start.said["hub"])
    page = apply_flags(settings.page, start.said["page"], PAGE_FLAGS)
    metrics = apply_flags(settings.metrics, start.said["metrics"], METRICS_FLAGS)
    if start.resume is not None:
        _check_opened(section, start)
        _check_page_opened(page, metrics, start)
    checkpoint = apply_flags(settings.checkpoint, start.said["checkpoint"])
    goes_back = start.said["checkpoint"] and checkpoint.recovery != "latest"
    if goes_back and not RunFolder(expanded(section.run)).has_checkpoint:
        raise StorageError(
            f"{section.run}: contains no checkpoint to resume from; correct --run, or remove --recovery"
        )
    return msgspec.structs.replace(settings, hub=section, checkpoint=checkpoint, page=page, metrics=metrics)


def check_hub(config: Path | None, start: Start, printer: Printer) -> None:
    """Print the maximum memory that a hub with these settings may need. Does not start the hub.

    Raises `CapacityError` if this machine has less.
    """
    settings = _all_settings(config, start)
    allow_many_files()
    parts = make_hub(settings, load=start.load, trust_code=start.trust_code).most_memory()
    needed, machine = sum(part.nbytes for part in parts), memory_limit_bytes()
    connections, files = settings.limits.devices_max, connections_that_fit()
    if printer.json:
        printer.object(
            HubCheck(
                parts={part.name: part.nbytes for part in parts},
                bytes=needed,
                machine_bytes=machine,
                connections=connections,
                connections_that_fit=files,
            )
        )
    else:
        rows = [(part.name, _mebibytes(part.nbytes), part.why) for part in parts]
        print_table(printer, [("part", "MiB", "content"), *rows, ("total", _mebibytes(needed), "maximum")])
        printer.line(f"this machine: {_mebibytes(machine).strip()} MiB; open files for {files:,} connections")
    if 0 < machine < needed:
        raise CapacityError(
            f"the hub may need {_mebibytes(needed).strip()} MiB, but this machine has "
            f"{_mebibytes(machine).strip()} MiB; lower limits.devices_max, updates_held_max or snapshots_max"
        )
    if files < connections:
        raise CapacityError(
            f"the open-file limit allows {files:,} connections, but limits.devices_max is {connections:,}; "
            "raise the open-file limit (ulimit -n, LimitNOFILE=), or lower limits.devices_max"
        )


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:8,.1f}"


def run_hub(config: Path | None, start: Start, printer: Printer) -> None:
    """Run a hub with the settings of a file or of a run to resume, overridden by flags."""
    settings = _all_settings(config, start)

    notifier = find_notifier()

    def on_report(report: HubReport) -> None:
        figures = {"figures": report.figures} if report.figures and printer.json else {}
        printer.event(report.event, device=report.device_id, detail=report.detail, **figures)
        if report.event == "listening":
            notifier.ready()
        if not report.device_id:
            notifier.status(f"{report.event} {report.detail}")

    def on_open(urls: Mapping[str, str], plan: "PagePlan") -> None:
        if "page" in urls:
            printer.event("page", detail=f"{urls['page']}; the tokens are in {plan.tokens.folder}")
        if "metrics" in urls:
            printer.event("metrics", detail=f"{urls['metrics']}/metrics")

    allow_many_files()
    prepare_for_service()
    plan = prepare_page(settings)
    hub = make_hub(settings, on_report, load=start.load, trust_code=start.trust_code)
    served = hub if plan is None else HubWithPage(hub, plan, on_open)
    reason = serve(
        served, PROGRESS_S, _progress_of(hub, notifier, printer), hub.model_file.parent, notifier=notifier
    )
    _print_end(hub, reason, printer)


def _progress_of(hub: HubRuntime, notifier: Notifier, printer: Printer) -> Callable[[], None]:
    """Return a callback that reports the hub's counts if they have changed."""
    seen: HubProgress | None = None

    def on_progress() -> None:
        nonlocal seen
        if not hub.recovered:
            return
        counts = count_progress(hub.core)
        if counts == seen:
            return
        seen = counts
        notifier.status(_in_words(counts))
        printer.figures("progress", counts, _in_words(counts))

    return on_progress


def _print_end(hub: HubRuntime, reason: str, printer: Printer) -> None:
    """Print why the hub ended, its totals, and the path of the model."""
    core = hub.core
    best = describe_evaluation(core.policy_engine.state.evaluations.best) if hub.best_file.exists() else None
    totals = HubTotals(
        reason=reason,
        version=core.version,
        updates_applied=core.updates_applied,
        updates_rejected=core.updates_rejected,
        duplicates=core.duplicates,
        model=str(hub.model_file.resolve()),
        best=UNSET if best is None else best,
        best_model=UNSET if best is None else str(hub.best_file.resolve()),
    )
    refused = f" and {totals.updates_rejected} rejected" if totals.updates_rejected else ""
    done = f"{totals.updates_applied} updates applied{refused}"
    printer.figures("stopped", totals, f"{reason}: version {totals.version}, {done}, model in {totals.model}")
    if best is not None and not printer.json:
        accuracy = "" if best.accuracy is None else f", accuracy {best.accuracy:.2%}"
        shown = f"version {best.version}, loss {best.loss:.4g}{accuracy}"
        printer.event("best", detail=f"{shown}, model in {totals.best_model}")


def _settings(config: Path | None, start: Start) -> HubSettings:
    """Return the settings of a file, with flags applied to its `[model]` table."""
    table = {} if config is None else read_toml(config, dict[str, Any])
    model = start.said["model"]
    if model:
        table["model"] = model_of(table.get("model"), model)
    elif config is None:
        raise ConfigError("no model; pass --model FILE.onnx, or a settings file with a [model] table")
    hub = table.get("hub")
    run = {"run": HubSection().run} | (hub if isinstance(hub, dict) else {}) | start.said["hub"]
    if isinstance(run["run"], str):
        refuse_modules_in(expanded(run["run"]))  # check before importing a policy
    try:
        return convert(table, HubSettings, where="flags" if config is None else str(config))
    except ConfigError as error:
        raise named_by_flag(error, model, {"file": "--model"}) from error


def _resumed(run: Path, config: Path | None, start: Start) -> HubSettings:
    """Return the settings of a run's last start.

    Raises `ConfigError` if other settings were passed as well.
    """
    passed = ["the settings file"] if config is not None else []
    passed += [f"--{'model' if name == 'file' else name}" for name in start.said["model"]]
    passed += ["--run"] if "run" in start.said["hub"] else []
    if passed:
        raise ConfigError(
            f"--resume uses the settings in the run's folder; remove {', '.join(passed)}. Without --resume, a hub "
            "also resumes the run that its folder contains"
        )
    return read_record(run, trust_code=start.trust_code)


def _check_opened(section: HubSection, start: Start) -> None:
    """Raise `AddressError` if a resumed run's settings accept connections that no flag confirms.

    The flags must repeat `keys` and, if the hub listens beyond this machine, `bind` and `insecure`.
    """
    asked = {"keys": f"--keys {section.keys}"}
    if not is_within_machine(section.bind):
        asked = {"bind": f"--bind {section.bind}"} | asked | {"insecure": "--insecure"}
    missing = [flag for name, flag in asked.items() if getattr(section, name) and name not in start.said["hub"]]
    if missing:
        raise AddressError(
            f"{start.resume}: the settings of this run decide who can connect to the hub; "
            f"to confirm them, add {' '.join(missing)}"
        )


def _check_page_opened(page: PageSection, metrics: MetricsSection, start: Start) -> None:
    """Raise `AddressError` if a resumed run's settings serve a page beyond this machine that no flag confirms."""
    binds = {"page": page.bind, "metrics": metrics.bind}
    missing = [
        f"--{table} {bind}"
        for table, bind in binds.items()
        if bind is not None and not is_local(bind) and "bind" not in start.said[table]
    ]
    if missing and page.insecure and "insecure" not in start.said["page"]:
        missing.append("--page-insecure")
    if missing:
        raise AddressError(
            f"{start.resume}: the settings of this run serve its page beyond this machine; "
            f"to confirm them, add {' '.join(missing)}"
        )


def allow_many_files() -> None:
    """Raise this process's open-file limit. Each device's connection uses one file; the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS rejects values up to its reported hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def count_progress(core: HubCore) -> HubProgress:
    """Return the figures of a progress line."""
    policy, loss = core.policy_engine, core.members.loss()
    last = policy.state.evaluations.last
    return HubProgress(
        version=core.version,
        updates_applied=core.updates_applied,
        devices_live=core.members.live_count,
        updates_buffered=policy.gathering.count or UNSET,
        updates_rejected=core.updates_rejected or UNSET,
        alarms=policy.divergence.count or UNSET,
        loss=UNSET if loss is None else float(f"{loss:.4g}"),
        accuracy=UNSET if last is None or last.accuracy is None else round(last.accuracy, 4),
    )


def _in_words(counts: HubProgress) -> str:
    shown = msgspec.to_builtins(counts)
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown.items())
