"""The `edgeasync` command: parses arguments, and turns errors into one line and an exit code."""

import contextlib
import errno
import io
import logging
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from edgeasync import errors
from edgeasync.cli.mistakes import Commands, UsageError, commands_of, sentence_of
from edgeasync.cli.options import (
    AgentConfig,
    AnswerTimeout,
    HubAddress,
    Json,
    LogLevel,
    OperatorKeys,
    Source,
    TrustCode,
)
from edgeasync.cli.output import Printer, tell, visible
from edgeasync.net.address import DEFAULT_ADDRESS
from edgeasync.version import VERSION

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train one model across many unequal, unreliable devices, without waiting for any of them.",
    epilog="Exit codes: 0 done, 2 settings, 3 data, 4 protocol, 5 another model, 6 no hub, 7 refused, 8 address, "
    "9 files, 10 graph, 11 keys, 12 machine too small, 13 device unfit, 14 no memory for a step, "
    "130 demo interrupted, 1 anything else.",
)

GROUPS = {
    "model": (".model", "Build, inspect and check training graphs of ONNX models."),
    "keys": (".keys", "Manage a hub's keys: create them, enrol devices, revoke keys."),
    "device": (".orders", "Exclude a device from a running hub's training, or release it."),
    "service": (
        ".service",
        "Run an agent, a hub or a peer under systemd: start at boot, restart after a crash, watch for hangs.",
    ),
}
"""Command groups: the module with the commands, imported on first use, and the group's help."""

for name, (module, sentence) in GROUPS.items():
    app.add_typer(typer.Typer(cls=commands_of(module), no_args_is_help=True, help=sentence), name=name)


@app.command()
def hub(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(help="The hub's settings file (TOML). Without --model, it needs a [model] table."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Resume the run in this folder with the settings of its last start."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Print the maximum memory this hub may need, part by part, and exit.")
    ] = False,
    trust_code: TrustCode = False,
    log_level: LogLevel = None,
    json: Json = False,
) -> None:
    """Run a hub: keep the model and train it with the devices that join.

    The hub ends when its [hub] stop setting is reached, or on Ctrl-C. If the run folder already
    contains a run, the hub resumes it.
    """
    from edgeasync.cli.hub import Start, check_hub, run_hub
    from edgeasync.cli.serving import log_to_stderr

    log_to_stderr(log_level)
    act = check_hub if check else run_hub
    act(config, Start(context.obj, resume, trust_code), Printer(json=json))


@app.command()
def agent(
    context: typer.Context, config: AgentConfig = None, log_level: LogLevel = None, json: Json = False
) -> None:
    """Train on this device's data for a hub. Ends when training ends, or on Ctrl-C."""
    from edgeasync.cli.agent import run_agent
    from edgeasync.cli.serving import log_to_stderr

    log_to_stderr(log_level)
    run_agent(config, context.obj, Printer(json=json))


@app.command()
def peer(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="The peer's settings file (TOML).")] = None,
    log_level: LogLevel = None,
    json: Json = False,
) -> None:
    """Train on this device's data and average the model with peers, without a hub.

    Ends at --steps-max, --epochs or --rounds-max, or on Ctrl-C.
    """
    from edgeasync.cli.peer import run_peer
    from edgeasync.cli.serving import log_to_stderr

    log_to_stderr(log_level)
    run_peer(config, context.obj, Printer(json=json))


@app.command()
def status(
    hub: HubAddress = DEFAULT_ADDRESS,
    timeout_s: AnswerTimeout = 3.0,
    keys: OperatorKeys = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="Show everything about this device.")] = None,
    state: Annotated[
        str | None, typer.Option(metavar="STATE", help="Show only devices in this state, such as lost.")
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Sort the devices, the worst first: by name, state, seen, updates, stale, speed, loss, period, "
            "talk or traffic [default: those that need attention first].",
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--all", help="Show all devices, even if they do not fit the terminal.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show the status every second, until Ctrl-C.")] = False,
    json: Json = False,
) -> None:
    """Show the status of a running hub, and which of its devices need attention."""
    from edgeasync.cli.status import print_status, view_of
    from edgeasync.cli.watching import watch_status
    from edgeasync.net.status import fetch_events, fetch_status

    printer, view = Printer(json=json), view_of(device, state, sort, whole=whole, json=json)

    def show(found: dict[str, Any]) -> None:
        events = [] if device is None else fetch_events(hub, 0, timeout_s, keys).events
        print_status(found, hub, printer, view, events)

    if watch:
        watch_status(lambda: fetch_status(hub, timeout_s, keys, watch=True), show, hub, printer)
    else:
        show(fetch_status(hub, timeout_s, keys))


@app.command()
def events(
    hub: HubAddress = DEFAULT_ADDRESS,
    timeout_s: AnswerTimeout = 3.0,
    keys: OperatorKeys = None,
    follow: Annotated[bool, typer.Option("--follow", help="Print new events as they happen.")] = False,
    json: Json = False,
) -> None:
    """Print the latest events of a running hub, such as devices that join or are lost."""
    from edgeasync.cli.events import EventsPrinter
    from edgeasync.net.status import fetch_events

    events = EventsPrinter(lambda after: fetch_events(hub, after, timeout_s, keys), Printer(json=json))
    if follow:
        events.follow()
    else:
        events.print_new()


@app.command()
def wake(
    hub: HubAddress = DEFAULT_ADDRESS,
    timeout_s: AnswerTimeout = 3.0,
    keys: OperatorKeys = None,
    json: Json = False,
) -> None:
    """Return an idle fleet to full pace. Prints the hub's status."""
    from edgeasync.cli.status import print_status
    from edgeasync.net.status import fetch_status

    status = fetch_status(hub, timeout_s, keys, wake=True)
    print_status(status, hub, Printer(json=json))


@app.command()
def demo(
    devices: Annotated[int, typer.Option(min=2, max=64, help="Number of agents.")] = 4,
    seconds: Annotated[float, typer.Option(min=6.0, max=3600.0, help="Training time in seconds.")] = 15.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of the data split and the initial model.")
    ] = 0,
    run: Annotated[Path | None, typer.Option(help="Folder of the run [default: a new folder in runs/].")] = None,
    page: Annotated[bool, typer.Option("--page", help="Serve a page in the browser, and print its URL.")] = False,
    json: Json = False,
) -> None:
    """Train on handwritten digits with a hub and unequal agents on this machine.

    One agent is killed and rejoins.
    """
    from edgeasync.cli.demo import run_demo

    run_demo(devices=devices, seconds=seconds, seed=seed, run=run, page=page, printer=Printer(json=json))


@app.command()
def policies(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="KIND", help="Show one policy, or all policies of one group such as staleness."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON array of objects.")] = False,
) -> None:
    """List all policies for a hub's settings: how updates are weighed, gathered and applied."""
    from edgeasync.cli.policies import print_policies

    print_policies(kind, Printer(json=json))


@app.command()
def settings(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A settings file of a hub, an agent or a peer.")],
    kind: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="PROGRAM",
            help="Program that reads the file, if this is ambiguous: hub, agent or peer.",
        ),
    ] = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Print only settings that differ from the default.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON array of objects.")] = False,
) -> None:
    """Print the effective value of every setting, and where it comes from."""
    from edgeasync.cli.settings import print_settings

    print_settings(file, kind, Printer(json=json), changed=changed)


@app.command()
def schema(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="hub.toml, agent.toml or peer.toml, or a command: status, hub, replay and so on.",
        ),
    ],
) -> None:
    """Print the JSON schema of a settings file, or of what a command prints with --json.

    Editors use the schema of a settings file to complete and check keys.
    """
    from edgeasync.cli.schemas import print_schema

    print_schema(name, Printer(json=False))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path, typer.Option(help="Output file: .onnx for inference, .safetensors or .npz for arrays.")],
    peft: Annotated[
        bool, typer.Option("--peft", help="Write LoRA adapters for Hugging Face's PEFT, to the folder --out.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="The forward model [default: the one in the run's folder].")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Export the version with the best evaluation [default: the newest].")
    ] = False,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Export the model of a run as ONNX for inference, as arrays, or as adapters for PEFT.

    Works while the run's hub is running.
    """
    from edgeasync.cli.model import export_run

    export_run(run, model, out, Printer(json=json), best=best, peft=peft, trust_code=trust_code)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or a copy of one.")],
    until: Annotated[int | None, typer.Option(min=0, metavar="N", help="Stop after journal entry N.")] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="CHECKPOINT",
            help="Start at this checkpoint [default: the earliest one that the journal continues].",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.safetensors", help="Write the model after the last replayed entry to this file."
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Replay the whole run, compare the state with every checkpoint, and check all counts.",
        ),
    ] = False,
    alarms: Annotated[bool, typer.Option("--alarms", help="List only the alarms, with begin and end.")] = False,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Show the outcome of every update of a run.

    Only reads the run's folder. Works while the run's hub is running.
    """
    from edgeasync.cli.replay import print_alarms, replay_run, verify_replay

    if verify:
        others = {"--until": until, "--from": checkpoint, "--export": export, "--alarms": alarms or None}
        said = [flag for flag, value in others.items() if value is not None]
        verify_replay(run, said, Printer(json=json), trust_code=trust_code)
        return
    if alarms:
        said = [] if export is None else ["--export"]
        print_alarms(run, until, checkpoint, said, Printer(json=json), trust_code=trust_code)
        return
    replay_run(run, until, checkpoint, export, Printer(json=json), trust_code=trust_code)


@app.command()
def history(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    csv: Annotated[bool, typer.Option("--csv", help="Print one row per update as CSV.")] = False,
    evaluations: Annotated[
        bool, typer.Option("--evaluations", help="With --csv: print one row per evaluation instead.")
    ] = False,
) -> None:
    """Plot the losses and evaluations of a run in the terminal.

    Works while the run's hub is running.
    """
    from edgeasync.cli.history import print_history

    print_history(run, Printer(json=False), csv=csv, evaluations=evaluations)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder of runs, or of one run.")] = Path("runs"),
    json: Json = False,
) -> None:
    """List the runs in a folder, or the checkpoints of one run, with versions and problems."""
    from edgeasync.cli.runs import print_runs

    print_runs(folder, Printer(json=json))


@app.command()
def doctor(
    context: typer.Context,
    config: AgentConfig = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="GRAPH.onnx",
            help="Training graph for the speed test [default: the graph that the hub sent last].",
        ),
    ] = None,
    root: Annotated[Path, typer.Option(help="Read /sys, /proc and /run below this folder.")] = Path("/"),
    json: Json = False,
) -> None:
    """Check this device: machine, state, hub, data and speed.

    Prints one line per check: ok, warn or fail, and a remedy.
    """
    from edgeasync.cli.doctor import run_doctor

    run_doctor(config, context.obj, model, root, Printer(json=json))


@app.command()
def bundle(
    out: Annotated[Path, typer.Option(help="New folder for the wheels and install.sh.")],
    platform: Annotated[str, typer.Option(help="The board: pi, jetson or x86.")],
    source: Source = None,
    python: Annotated[str, typer.Option(help="Python version on the board: 3.11, 3.12 or 3.13.")] = "3.11",
    extras: Annotated[str, typer.Option(help="Extras to include, separated by commas, such as hub,zstd.")] = "",
    json: Json = False,
) -> None:
    """Download everything that a board needs into a folder, to install it there without a network.

    On the board, run: sh OUT/install.sh.
    """
    from edgeasync.cli.service import bundle_wheels

    bundle_wheels(source, platform, python, out, Printer(json=json), extras=extras)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        Printer(json=False).line(f"edgeasync {VERSION}, Python {platform.python_version()}")
        raise typer.Exit


def main() -> None:
    """Run the command line and exit the process with its exit code."""
    _open_streams()
    # Until a command handles Ctrl-C itself, Ctrl-C ends the process at once. So an interrupted
    # import does not print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = run_command()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # Everything is flushed and closed. A normal exit could hang on a training thread or on a thread
    # of OpenBLAS.
    os._exit(code)


def _open_streams() -> None:
    """Replace closed or missing standard streams with /dev/null."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `descriptor`
    # Python sets a closed stream to None. Its descriptor may belong to another file by now.
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # Python's default for standard error


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _cure(error: OSError) -> str:
    """Return the remedy for a file that cannot be used."""
    if isinstance(error, PermissionError):
        return "run this command as the file's owner, or change its permissions"
    return "free disk space" if error.errno in _FULL else "correct the path"


def run_command() -> int:
    """Run the command of `sys.argv` and return its exit code.

    Print a user's mistake as one line on standard error.
    """
    try:
        return int(app(standalone_mode=False, prog_name="edgeasync") or 0)
    except UsageError as error:
        if "\n" in error.message:  # a subcommand is missing, so the message is the help
            error.show()
        else:
            tell(f"edgeasync: {visible(sentence_of(error))}")
        return int(error.exit_code)
    except errors.EdgeAsyncError as error:
        tell(f"edgeasync: {visible(errors.with_flags(' '.join(str(error).split())))}")
        return error.exit_code
    except OSError as error:
        # An error from a written file contains the file name. If the disk is full and there is no
        # file name, the error is from standard output.
        place = "standard output" if error.filename is None and error.errno in _FULL else error.filename
        if place is None:
            raise
        logging.getLogger(__name__).debug("full traceback", exc_info=True)
        tell(f"edgeasync: {visible(str(place))}: {error.strerror}; {_cure(error)}")
        return errors.StorageError.exit_code
    except SystemExit as ended:
        code = ended.code or 0
        return code if isinstance(code, int) else 1
