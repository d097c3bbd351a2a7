"""`edgeasync replay`: prints the history of a run from its folder."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET

from edgeasync.cli.output import Printer, print_table
from edgeasync.durable.files import check_out
from edgeasync.durable.run_alarms import RunAlarm, list_alarms
from edgeasync.durable.run_events import Line, ReplayedEvaluation, ReplayedUpdate, RunEvent
from edgeasync.durable.run_replay import Beginning, ReplaySummary, RunReplay
from edgeasync.durable.verification import verify_run
from edgeasync.errors import ConfigError
from edgeasync.graphs.model_file import VALUES_SUFFIX, save_model
from edgeasync.ops.trained import input_files


def replay_run(
    run: Path,
    until: int | None,
    checkpoint: str | None,
    export: Path | None,
    printer: Printer,
    *,
    trust_code: bool,
) -> None:
    """Print the history of a run and its final state, and export the model if a path is given."""
    if export is not None:
        if export.suffix != VALUES_SUFFIX:
            raise ConfigError(f"--export {export}: the file name must end in {VALUES_SUFFIX}")
        check_out("--export", export, *input_files(run), run=run)
    replay = RunReplay(run, until=until, checkpoint=checkpoint, trust_code=trust_code)
    try:
        _print_beginning(replay.beginning, printer)

        def on_line(line: Line) -> bool:
            if not printer.unread:
                _print_line(line, printer)
            return export is not None or not printer.unread

        unfinished = replay.tell(on_line)
        summary = replay.summary(unfinished)
        if export is not None:
            core, last = replay.core, replay.core.policy_engine.state.evaluations.last
            save_model(
                export,
                replay.spec,
                replay.snapshot.vector,
                lineage=core.lineage,
                version=core.version,
                evaluation=last if last is not None and last.number == core.version else None,
                private=False,
            )
            summary = msgspec.structs.replace(summary, model=str(export))
    finally:
        replay.close()
    if not printer.unread:
        _print_summary(summary, printer)


def print_alarms(
    run: Path,
    until: int | None,
    checkpoint: str | None,
    others: Sequence[str],
    printer: Printer,
    *,
    trust_code: bool,
) -> None:
    """Print the alarms of a run with begin and end.

    `others` contains other flags that the user passed. Raises `ConfigError` if there are any,
    because `--alarms` cannot be combined with them.
    """
    if others:
        raise ConfigError(f"--alarms prints only alarms; remove {', '.join(others)}")
    alarms = list_alarms(run, until=until, checkpoint=checkpoint, trust_code=trust_code)
    if printer.json:
        for alarm in alarms:
            printer.object(alarm)
    elif not alarms:
        printer.line("no alarms")
    else:
        print_table(printer, [("begin", "end", "device", "cause"), *map(_alarm_row, alarms)])


def _alarm_row(alarm: RunAlarm) -> tuple[str, ...]:
    end = "active" if alarm.end_s is None else f"{alarm.end_s:.1f} s"
    return f"{alarm.begin_s:.1f} s", end, alarm.device or "fleet", alarm.cause


def verify_replay(run: Path, others: Sequence[str], printer: Printer, *, trust_code: bool) -> None:
    """Replay a whole run and print what was verified.

    `others` contains other flags that the user passed. Raises `ConfigError` if there are any,
    because `--verify` cannot be combined with them.
    """
    if others:
        raise ConfigError(f"--verify replays the whole run; remove {', '.join(others)}")
    found = verify_run(run, trust_code=trust_code)
    unfinished = f"; the last {found.unfinished_bytes} bytes are an unfinished write"
    printer.result(
        found,
        f"verified: entries replayed: {found.entries}, checkpoints compared: {len(found.compared)}, only read: "
        f"{len(found.read)}, updates applied: {found.updates_applied}, all counts agree"
        f"{unfinished if found.unfinished_bytes else ''}",
    )


def _print_beginning(beginning: Beginning, printer: Printer) -> None:
    gone = "; earlier entries are missing, or do not continue into this checkpoint" if beginning.entry else ""
    printer.result(
        beginning,
        f"from {beginning.checkpoint}: entry {beginning.entry}, version {beginning.version}, "
        f"lineage {beginning.lineage}{gone}",
        *[f"note: {remark}" for remark in beginning.remarks],
    )


def _print_line(line: Line, printer: Printer) -> None:
    if printer.json:
        printer.object(line)
        return
    printer.line(f"{line.entry:>8} {line.hub_s:>10.3f} s  {line.event:<11} {_words(line)}".rstrip())


def _words(line: Line) -> str:
    match line:
        case ReplayedUpdate():
            return _update(line)
        case ReplayedEvaluation():
            accuracy = "" if line.accuracy is None else f", accuracy {line.accuracy:.2%}"
            best = ", the best so far" if line.best else ""
            return f"version {line.version}, loss {line.loss:.4g}{accuracy}{best}"
        case RunEvent():
            words = [line.device, line.detail]
            if line.event == "resumed":
                words.append(f"(lineage {line.lineage}, version {line.version})")
            return " ".join(filter(None, words))


def _update(update: ReplayedUpdate) -> str:
    outcome = update.outcome if not update.reason else f"{update.outcome} ({update.reason})"
    stale = "" if update.staleness is None else f", staleness {update.staleness}"
    loss = "no loss" if update.loss is None else f"loss {update.loss:.4g}"
    norm = "" if update.norm is None else f", norm {update.norm:.3g}"
    trained = f"{update.local_steps} steps from version {update.base}"
    if update.delay_steps:
        trained += f", delay {update.delay_steps}"
    return f"{update.device} seq {update.seq}, {trained}: {outcome}{stale}, {loss}{norm}, version {update.version}"


def _print_summary(summary: ReplaySummary, printer: Printer) -> None:
    if printer.json:
        printer.object(summary)
        return
    if summary.unfinished_bytes:
        printer.line(
            f"the last {summary.unfinished_bytes} bytes of the journal are an unfinished write: "
            "its hub is running, or was killed"
        )
    printer.line(
        f"after entry {summary.entry}: version {summary.version}, lineage {summary.lineage}, "
        f"model {summary.model_xxh3}"
    )
    waiting = f", {summary.updates_buffered} waiting" if summary.updates_buffered else ""
    rollbacks = f", {summary.rollbacks} rollbacks" if summary.rollbacks else ""
    printer.line(
        f"updates: {summary.updates_applied} applied, {summary.updates_rejected} rejected{waiting}, "
        f"{summary.duplicates} duplicates{rollbacks}"
    )
    for name, evaluation in (("last", summary.evaluation), ("best", summary.best)):
        if evaluation is not None:
            accuracy = "" if evaluation.accuracy is None else f", accuracy {evaluation.accuracy:.2%}"
            printer.line(f"{name} evaluation: version {evaluation.version}, loss {evaluation.loss}{accuracy}")
    for device in summary.devices:
        printer.line(
            f"{device.id}: {device.state}, {device.updates_applied} updates applied, last push {device.seq_last}"
        )
    if summary.model is not UNSET:
        printer.line(f"model: {summary.model}")
