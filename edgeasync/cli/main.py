"""The `edgeasync` command: arguments to settings, errors to one line and an exit code."""

import contextlib
import errno
import io
import logging
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from edgeasync import errors
from edgeasync.cli import device_commands, keys_commands, model_commands, service_commands
from edgeasync.cli.mistakes import Commands
from edgeasync.cli.options import (
    AgentConfig,
    AnswerTimeout,
    Data,
    DeviceId,
    Freeze,
    HubAddress,
    Hubs,
    Json,
    LogLevel,
    Loss,
    NoKeys,
    OperatorKeys,
    Output,
    Provider,
    Source,
    State,
    StepTime,
    Target,
    Threads,
    Train,
    TrustCode,
    given,
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

app.add_typer(model_commands.app, name="model")
app.add_typer(keys_commands.app, name="keys")
app.add_typer(device_commands.app, name="device")
app.add_typer(service_commands.app, name="service")


@app.command()
def hub(
    config: Annotated[
        Path | None,
        typer.Argument(help="The hub's settings, a TOML file. Without --model it needs at least [model]."),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--model", help="What to train: an ONNX model, or a training graph built from one."),
    ] = None,
    loss: Loss = None,
    train: Train = None,
    freeze: Freeze = None,
    output: Output = None,
    target: Target = None,
    bind: Annotated[str | None, typer.Option(help=f"Address to listen on [default: {DEFAULT_ADDRESS}].")] = None,
    run: Annotated[
        str | None, typer.Option(help="Folder of this run; the hub makes a missing one [default: runs/default].")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Resume the run in this folder with the settings of its last start."),
    ] = None,
    recovery: Annotated[
        str | None,
        typer.Option(help="Checkpoint to resume from: latest, best, or a name [default: latest]."),
    ] = None,
    durability: Annotated[
        str | None,
        typer.Option(
            help="When the hub answers a device: after its update is on disk (journal), or at once (checkpoint) "
            "[default: journal]."
        ),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Folder of this hub's keys. The hub then admits only the keys on its list."
        ),
    ] = None,
    knocking: Annotated[
        bool, typer.Option("--knocking", help="Record unknown keys for 'edgeasync keys pending'.")
    ] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without keys.")] = False,
    trust_code: TrustCode = False,
    frozen: Annotated[
        str | None,
        typer.Option(
            help="What to do with a device whose frozen arrays differ: refuse, or warn and let it train "
            "[default: refuse]."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only print the most memory that this hub may need, part by part.")
    ] = False,
    log_level: LogLevel = None,
    json: Json = False,
) -> None:
    """Hold the model and train it with the devices that join. Ends at its [hub] stop setting, or at Ctrl-C.

    If the folder already holds a run, the hub resumes it.
    """
    from edgeasync.cli.hub import Flags, check_hub, run_hub
    from edgeasync.cli.serving import log_to_stderr

    log_to_stderr(log_level)
    section = given(
        bind=bind, run=run, durability=durability, keys=keys, insecure=insecure, knocking=knocking, frozen=frozen
    )
    model = given(file=file, loss=loss, train=train, freeze=freeze, output=output, target=target)
    act = check_hub if check else run_hub
    act(config, Flags(section, model, recovery, resume, trust_code), Printer(json=json))


@app.command()
def agent(
    config: AgentConfig = None,
    hub: Hubs = None,
    data: Data = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="A trainer of your own: package.module:factory, from this machine's installation.",
        ),
    ] = None,
    device_id: DeviceId = None,
    state: State = None,
    step_s_min: StepTime = None,
    threads: Threads = None,
    provider: Provider = None,
    bandwidth_bytes_per_s_max: Annotated[
        str | None,
        typer.Option(
            "--bandwidth-max",
            help="Most bytes per second, both ways together, such as '1 MB' [default: no cap].",
        ),
    ] = None,
    bytes_per_day_max: Annotated[
        str | None,
        typer.Option(help="Most bytes of 24 hours, both ways together, such as '20 MB' [default: no limit]."),
    ] = None,
    spool: Annotated[
        str | None,
        typer.Option(
            help="What the device keeps over a power cut: identity, or full (also the unanswered update) "
            "[default: identity]."
        ),
    ] = None,
    alone_steps_max: Annotated[
        int | None, typer.Option(help="Most extra local steps while no hub can be reached [default: 0].")
    ] = None,
    local: Annotated[
        list[str] | None,
        typer.Option(help="Arrays that stay on this device, a pattern such as 'head.*'. May be repeated."),
    ] = None,
    insecure: NoKeys = False,
    enrol: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="Token from 'edgeasync keys enrol', to bring this device's own key to the hub; - reads it from "
            "standard input, so that no other user of the machine sees it.",
        ),
    ] = None,
    hub_key: Annotated[
        str | None,
        typer.Option(metavar="PUBLIC_KEY", help="The hub's public key, to ask for admission without a token."),
    ] = None,
    when_finished: Annotated[
        str | None,
        typer.Option(help="What to do after the end of training: exit, or wait for the next run [default: exit]."),
    ] = None,
    log_level: LogLevel = None,
    json: Json = False,
) -> None:
    """Train on this device's data for a hub. Ends with the training, or at Ctrl-C."""
    from edgeasync.cli.agent import run_agent
    from edgeasync.cli.serving import log_to_stderr

    log_to_stderr(log_level)
    section = given(
        hub=hub, data=data, trainer=trainer, device_id=device_id, state=state, step_s_min=step_s_min,
        threads=threads, provider=provider,
        bandwidth_bytes_per_s_max=_bytes_or_text(bandwidth_bytes_per_s_max),
        bytes_per_day_max=_bytes_or_text(bytes_per_day_max),
        spool=spool, alone_steps_max=alone_steps_max, local=local, insecure=insecure,
        enrol=enrol, hub_key=hub_key, when_finished=when_finished,
    )  # fmt: skip
    run_agent(config, section, Printer(json=json))


@app.command()
def peer(
    config: Annotated[Path | None, typer.Argument(help="The peer's settings, a TOML file.")] = None,
    peers: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The devices that average, a TOML file, the same on all."),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(help="How devices average: in a ring, or each with all (all_to_all) [default: ring]."),
    ] = None,
    data: Data = None,
    file: Annotated[
        str | None,
        typer.Option("--model", help="What to train: an ONNX model, or a training graph built from one."),
    ] = None,
    loss: Loss = None,
    train: Train = None,
    freeze: Freeze = None,
    output: Output = None,
    target: Target = None,
    device_id: DeviceId = None,
    state: State = None,
    bind: Annotated[
        str | None,
        typer.Option(help="Address to listen on [default: this device's in the file of peers]."),
    ] = None,
    steps_max: Annotated[
        int | None,
        typer.Option("--steps", help="Local steps to take, over all starts [default: no end]."),
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Passes over this device's data, instead of --steps.")
    ] = None,
    rounds_max: Annotated[
        int | None,
        typer.Option("--rounds", help="End after this number of rounds [default: no end]."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(help="Where to write the trained model at the end, .onnx or .safetensors."),
    ] = None,
    frozen: Annotated[
        str | None,
        typer.Option(
            help="What to do with a peer whose frozen arrays differ: refuse, or warn and average with it "
            "[default: refuse]."
        ),
    ] = None,
    step_s_min: StepTime = None,
    threads: Threads = None,
    provider: Provider = None,
    log_level: LogLevel = None,
    json: Json = False,
) -> None:
    """Train on this device's data, and average the model with peers, without a hub. Ends as told, or at Ctrl-C."""
    from edgeasync.cli.peer import run_peer
    from edgeasync.cli.serving import log_to_stderr

    log_to_stderr(log_level)
    section = given(
        peers=peers, topology=topology, data=data, device_id=device_id, state=state, bind=bind,
        steps_max=steps_max, epochs=epochs, rounds_max=rounds_max, out=out, frozen=frozen,
        step_s_min=step_s_min, threads=threads, provider=provider,
    )  # fmt: skip
    model = given(file=file, loss=loss, train=train, freeze=freeze, output=output, target=target)
    run_peer(config, section, model, Printer(json=json))


def _bytes_or_text(size: str | None) -> int | str | None:
    """Return a size as TOML would have it: a bare number is one of bytes."""
    from edgeasync.config import SIZE_DIGITS_MAX

    return int(size) if size is not None and size.isdecimal() and len(size) <= SIZE_DIGITS_MAX else size


@app.command()
def status(
    hub: HubAddress = DEFAULT_ADDRESS,
    timeout_s: AnswerTimeout = 3.0,
    keys: OperatorKeys = None,
    json: Json = False,
) -> None:
    """Ask a running hub for its status and that of its devices."""
    from edgeasync.cli.status import print_status
    from edgeasync.net.status import fetch_status

    status = fetch_status(hub, timeout_s, keys)
    print_status(status, hub, Printer(json=json))


@app.command()
def wake(
    hub: HubAddress = DEFAULT_ADDRESS,
    timeout_s: AnswerTimeout = 3.0,
    keys: OperatorKeys = None,
    json: Json = False,
) -> None:
    """Let a fleet that rests exchange at its full pace again. Prints the hub's status."""
    from edgeasync.cli.status import print_status
    from edgeasync.net.status import fetch_status

    status = fetch_status(hub, timeout_s, keys, wake=True)
    print_status(status, hub, Printer(json=json))


@app.command()
def demo(
    devices: Annotated[int, typer.Option(min=2, max=64, help="Number of agents.")] = 4,
    seconds: Annotated[float, typer.Option(min=6.0, max=3600.0, help="Seconds to train.")] = 15.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed for the split of the data and for the model.")
    ] = 0,
    run: Annotated[Path | None, typer.Option(help="Folder of this run [default: a new folder in runs/].")] = None,
    json: Json = False,
) -> None:
    """Train on handwritten digits with a hub and unequal agents on this machine. One agent dies and returns."""
    from edgeasync.cli.demo import run_demo

    run_demo(devices=devices, seconds=seconds, seed=seed, run=run, printer=Printer(json=json))


@app.command()
def policies(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="KIND", help="Show one kind, or all kinds of one part such as staleness."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON array of objects.")] = False,
) -> None:
    """List every kind of policy for a hub's settings: how updates are weighed, gathered and applied."""
    from edgeasync.cli.policies import print_policies

    print_policies(kind, Printer(json=json))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path, typer.Option(help="The file: .onnx, or .safetensors or .npz for arrays.")],
    model: Annotated[
        Path | None, typer.Option(help="The forward model [default: the one in the run's folder].")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Write the best version by evaluation [default: the newest version].")
    ] = False,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Write the model of a run: an ONNX file for inference, or its arrays. The run's hub may be running."""
    from edgeasync.cli.model import export_run

    export_run(run, model, out, Printer(json=json), best=best, trust_code=trust_code)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or a copy of one.")],
    until: Annotated[int | None, typer.Option(min=0, metavar="N", help="Stop after entry N.")] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="CHECKPOINT",
            help="Begin at this checkpoint [default: the earliest one that the journal continues].",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE.safetensors", help="Write the model after the last entry shown."),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Only compare the replayed state with every checkpoint on the way, and check all counts.",
        ),
    ] = False,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Show what became of every update of a run. Only reads the run's folder; the run's hub may be running."""
    from edgeasync.cli.replay import replay_run, verify_replay

    if verify:
        others = {"--until": until, "--from": checkpoint, "--export": export}
        verify_replay(run, given(**others), Printer(json=json), trust_code=trust_code)
        return
    replay_run(run, until, checkpoint, export, Printer(json=json), trust_code=trust_code)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder of runs, or of one run.")] = Path("runs"),
    json: Json = False,
) -> None:
    """List the runs in a folder, or the checkpoints of one run: version, time of the last write, and problems."""
    from edgeasync.cli.runs import print_runs

    print_runs(folder, Printer(json=json))


@app.command()
def doctor(
    config: AgentConfig = None,
    hub: Hubs = None,
    data: Data = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="GRAPH.onnx",
            help="A training graph, to time a step [default: the one that the hub sent last, if there is one].",
        ),
    ] = None,
    device_id: DeviceId = None,
    state: State = None,
    provider: Provider = None,
    insecure: NoKeys = False,
    root: Annotated[Path, typer.Option(help="Read /sys, /proc and /run below this folder.")] = Path("/"),
    json: Json = False,
) -> None:
    """Look at this device: machine, state, hub, data and speed. A line each: ok, warn or fail, and what to do."""
    from edgeasync.cli.doctor import run_doctor

    section = given(hub=hub, data=data, device_id=device_id, state=state, provider=provider, insecure=insecure)
    run_doctor(config, section, model, root, Printer(json=json))


@app.command()
def bundle(
    out: Annotated[Path, typer.Option(help="A new folder for the wheels and install.sh.")],
    platform: Annotated[str, typer.Option(help="For which board: pi, jetson or x86.")],
    source: Source = None,
    python: Annotated[str, typer.Option(help="The board's Python: 3.11, 3.12 or 3.13.")] = "3.11",
    extras: Annotated[str, typer.Option(help="Extras to include, such as hub,zstd.")] = "",
    json: Json = False,
) -> None:
    """Download all that a board needs into a folder, to install there without a network: sh OUT/install.sh."""
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
    """Run the command line, and end the process with its exit code."""
    _open_streams()
    # Until a command takes Ctrl-C for itself it ends the process at once, without a traceback from some import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = run_command()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # All is written and closed. On the long way out a training thread, or one of OpenBLAS's, can hang the process.
    os._exit(code)


def _open_streams() -> None:
    """Make standard streams that can be written to, whatever this process was started with."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, before another file does
    # Python has None for a stream that was closed. Its number may be another file's by now.
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python has it for standard error


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _cure(error: OSError) -> str:
    """Return what to do about a file that cannot be used."""
    if isinstance(error, PermissionError):
        return "run this as the user whose it is, or change its rights"
    return "free space there" if error.errno in _FULL else "correct the path"


def run_command() -> int:
    """Run the command of `sys.argv`; return its exit code. A user's mistake becomes one line on standard error."""
    try:
        app()
    except errors.EdgeAsyncError as error:
        tell(f"edgeasync: {visible(errors.with_flags(' '.join(str(error).split())))}")
        return error.exit_code
    except OSError as error:
        # What writes a file names it in an error of its own: a full disk without a name is the printed lines'.
        place = "standard output" if error.filename is None and error.errno in _FULL else error.filename
        if place is None:
            raise
        logging.getLogger(__name__).debug("the error in full", exc_info=True)
        tell(f"edgeasync: {visible(str(place))}: {error.strerror}; {_cure(error)}")
        return errors.StorageError.exit_code
    except SystemExit as ended:
        code = ended.code or 0
        return code if isinstance(code, int) else 1
    return 0
