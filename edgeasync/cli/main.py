"""The `edgeasync` command: arguments to settings, errors to one line and an exit code."""

import contextlib
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from edgeasync import errors
from edgeasync.cli.output import Printer, tell, visible
from edgeasync.version import VERSION

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train one model across many unequal, unreliable devices, without waiting for any of them.",
    epilog="Exit codes: 0 done, 2 settings, 3 data, 4 protocol, 5 another model, 6 no hub, 7 refused, 8 address, "
    "9 files, 10 graph, 11 keys, 12 machine too small, 13 device unfit, 1 anything else.",
)

model_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Build, inspect and check training graphs of ONNX models.",
)
app.add_typer(model_app, name="model")

keys_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Manage who may talk to a hub: make its keys, enrol devices, revoke keys.",
)
app.add_typer(keys_app, name="keys")

service_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Let systemd run an agent or a hub: at every boot, again after a crash, and with a watchdog.",
)
app.add_typer(service_app, name="service")

Json = Annotated[bool, typer.Option("--json", help="Print JSON objects, one per line.")]
ModelFile = Annotated[Path, typer.Argument(metavar="FILE.onnx", help="A forward model or a training graph.")]
Loss = Annotated[
    str | None,
    typer.Option(help="Loss of a forward model: cross_entropy, mse, l1, huber or bce_with_logits."),
]
Train = Annotated[
    list[str] | None, typer.Option(help="Parameters to train, a pattern such as 'head.*'. May be repeated.")
]
Freeze = Annotated[list[str] | None, typer.Option(help="Parameters not to train, a pattern. May be repeated.")]
Output = Annotated[str | None, typer.Option(help="The tensor that the loss reads [default: the only output].")]
Target = Annotated[
    str | None,
    typer.Option(
        help="What the loss compares the output with: label, or input for an autoencoder [default: label]."
    ),
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        metavar="LEVEL",
        help="Lowest level to log to stderr: debug (every frame), info, warning or error [default: warning].",
    ),
]
Keys = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the hub's keys [default: ~/.config/edgeasync/keys]."),
]
Reached = Annotated[
    list[str] | None,
    typer.Option(help="Where devices reach the hub, tcp://HOST:PORT. The folder remembers it. May be repeated."),
]
Kind = Annotated[str, typer.Argument(metavar="agent|hub", help="Which of the two.")]
UnitName = Annotated[
    str | None,
    typer.Option("--name", help="Another name for the unit, for a second one [default: edgeasync-agent or -hub]."),
]
Source = Annotated[
    str,
    typer.Argument(
        help="Where edgeasync comes from: a folder of wheels, a wheel, a clone, or a name in pip's index."
    ),
]
BatchSize = Annotated[int, typer.Option(min=2, max=65536, help="Examples in a step.")]


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
    bind: Annotated[str | None, typer.Option(help="Address to listen on [default: tcp://127.0.0.1:5555].")] = None,
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
    check: Annotated[
        bool, typer.Option("--check", help="Only print the most memory that this hub may need, part by part.")
    ] = False,
    log_level: LogLevel = None,
    json: Json = False,
) -> None:
    """Hold the model and train it with the devices that join. Ends at its [hub] stop setting, or at Ctrl-C.

    If the folder already holds a run, the hub resumes it.
    """
    from edgeasync.cli.hub import Flags, check_hub, run_hub  # noqa: PLC0415
    from edgeasync.cli.serving import log_to_stderr  # noqa: PLC0415

    log_to_stderr(log_level)
    flags = {"bind": bind, "run": run, "durability": durability, "keys": keys, "insecure": insecure or None}
    section = _given(flags | {"knocking": knocking or None})
    model = _given({"file": file}) | _graph_flags(loss, train, freeze, output, target)
    act = check_hub if check else run_hub
    act(config, Flags(section, model, recovery, resume), Printer(json=json))


@app.command()
def agent(
    config: Annotated[Path | None, typer.Argument(help="The agent's settings, a TOML file.")] = None,
    hub: Annotated[
        list[str] | None,
        typer.Option(help="The hub's address, tcp://HOST:PORT. May be repeated: the agent tries each in turn."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="This device's data: .npz with x and y, or .csv.")] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="A trainer of your own: package.module:factory, from this machine's installation.",
        ),
    ] = None,
    device_id: Annotated[str | None, typer.Option(help="This device's name [default: the host's name].")] = None,
    state: Annotated[
        str | None,
        typer.Option(help="Folder of this device's identity [default: ~/.local/state/edgeasync/DEVICE_ID]."),
    ] = None,
    step_s_min: Annotated[
        float | None,
        typer.Option(help="Least seconds that a local step takes, to imitate a slower device."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Cores for a step of an ONNX model [default: as suits the board, or 1].")
    ] = None,
    provider: Annotated[
        str | None,
        typer.Option(
            help="Execution provider that computes a graph: auto, cpu, cuda or tensorrt [default: auto]."
        ),
    ] = None,
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
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Speak to a hub beyond this machine without keys.")
    ] = False,
    enrol: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN", help="Token from 'edgeasync keys enrol', to bring this device's own key to the hub."
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
    topology: Annotated[
        str | None,
        typer.Option(
            help="How devices exchange: star (with a hub), or without one ring or all_to_all [default: star]."
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Without a hub: the devices that average, a TOML file, the same on all."
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--model", help="Without a hub: what to train, an ONNX model or a training graph."),
    ] = None,
    loss: Loss = None,
    train: Train = None,
    freeze: Freeze = None,
    output: Output = None,
    target: Target = None,
    bind: Annotated[
        str | None,
        typer.Option(help="Without a hub: address to listen on [default: this device's in the file of peers]."),
    ] = None,
    steps_max: Annotated[
        int | None,
        typer.Option("--steps", help="Without a hub: local steps to take, over all starts [default: no end]."),
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Without a hub: passes over this device's data, instead of --steps.")
    ] = None,
    rounds_max: Annotated[
        int | None,
        typer.Option("--rounds", help="Without a hub: end after this number of rounds [default: no end]."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(help="Without a hub: where to write the trained model at the end, .onnx or .safetensors."),
    ] = None,
    log_level: LogLevel = None,
    json: Json = False,
) -> None:
    """Train on this device's data, for a hub or together with peers. Ends with the training, or at Ctrl-C."""
    from edgeasync.cli.agent import run_agent  # noqa: PLC0415
    from edgeasync.cli.serving import log_to_stderr  # noqa: PLC0415

    log_to_stderr(log_level)
    flags: dict[str, Any] = {
        "hub": hub or None, "data": data, "trainer": trainer, "device_id": device_id, "state": state,
        "step_s_min": step_s_min,
        "threads": threads, "provider": provider,
        "bandwidth_bytes_per_s_max": _bytes_or_text(bandwidth_bytes_per_s_max),
        "bytes_per_day_max": _bytes_or_text(bytes_per_day_max),
        "spool": spool, "alone_steps_max": alone_steps_max, "local": local or None, "insecure": insecure or None,
        "enrol": enrol, "hub_key": hub_key, "when_finished": when_finished,
    }  # fmt: skip
    of_peers: dict[str, Any] = {
        "topology": topology, "peers": peers, "bind": bind, "steps_max": steps_max, "epochs": epochs,
        "rounds_max": rounds_max, "out": out,
    }  # fmt: skip
    model = _given({"file": file}) | _graph_flags(loss, train, freeze, output, target)
    run_agent(config, _given(flags), Printer(json=json), _given(of_peers), model)


@app.command()
def status(
    hub: Annotated[str, typer.Option(help="The hub's address, tcp://HOST:PORT.")] = "tcp://127.0.0.1:5555",
    timeout_s: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds to wait for an answer.")] = 3.0,
    keys: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of an operator's keys, to ask a hub with keys.")
    ] = None,
    json: Json = False,
) -> None:
    """Ask a running hub for its status and that of its devices."""
    from edgeasync.cli.status import print_status  # noqa: PLC0415

    print_status(hub, timeout_s, keys, Printer(json=json))


@app.command()
def wake(
    hub: Annotated[str, typer.Option(help="The hub's address, tcp://HOST:PORT.")] = "tcp://127.0.0.1:5555",
    timeout_s: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds to wait for an answer.")] = 3.0,
    keys: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of an operator's keys, to wake a hub with keys.")
    ] = None,
    json: Json = False,
) -> None:
    """Let a fleet that rests exchange at its full pace again. Prints the hub's status."""
    from edgeasync.cli.status import print_status  # noqa: PLC0415

    print_status(hub, timeout_s, keys, Printer(json=json), wake=True)


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
    from edgeasync.cli.demo import run_demo  # noqa: PLC0415

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
    from edgeasync.cli.policies import print_policies  # noqa: PLC0415

    print_policies(kind, Printer(json=json))


def _bytes_or_text(size: str | None) -> int | str | None:
    """Return a size as TOML would have it: a bare number is one of bytes."""
    return int(size) if size is not None and size.isdecimal() else size


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """Leave out the flags that were not given."""
    return {name: value for name, value in flags.items() if value is not None}


@model_app.command("build")
def model_build(
    forward: Annotated[Path, typer.Argument(metavar="FORWARD.onnx", help="The forward model.")],
    out: Annotated[Path, typer.Option(help="Where to write the training graph.")],
    loss: Loss = None,
    train: Train = None,
    freeze: Freeze = None,
    output: Output = None,
    target: Target = None,
    json: Json = False,
) -> None:
    """Build a training graph from a forward model. Its initial values go into a .safetensors file beside it."""
    from edgeasync.cli.model import build_model  # noqa: PLC0415

    flags = _graph_flags(loss, train, freeze, output, target)
    build_model(forward, flags, out, Printer(json=json))


@model_app.command("inspect")
def model_inspect(
    file: ModelFile,
    loss: Loss = None,
    train: Train = None,
    freeze: Freeze = None,
    output: Output = None,
    target: Target = None,
    batch_size: BatchSize = 32,
    json: Json = False,
) -> None:
    """Show what a model trains, and the arithmetic and memory of a step.

    An ONNX file does not say which layers were frozen in torch (requires_grad). Name them in --freeze.
    """
    from edgeasync.cli.model import inspect_model  # noqa: PLC0415

    inspect_model(file, _graph_flags(loss, train, freeze, output, target), batch_size, Printer(json=json))


@model_app.command("check")
def model_check(
    file: ModelFile,
    loss: Loss = None,
    train: Train = None,
    freeze: Freeze = None,
    output: Output = None,
    target: Target = None,
    batch_size: BatchSize = 8,
    json: Json = False,
) -> None:
    """Check a model's gradients against finite differences of its loss."""
    from edgeasync.cli.model import check_model  # noqa: PLC0415

    check_model(file, _graph_flags(loss, train, freeze, output, target), batch_size, Printer(json=json))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path, typer.Option(help="Where to write the ONNX file.")],
    model: Annotated[
        Path | None, typer.Option(help="The forward model [default: the one in the run's folder].")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Write the best version by evaluation [default: the newest version].")
    ] = False,
    json: Json = False,
) -> None:
    """Write the model of a run as a plain ONNX file for inference. The run's hub may be running."""
    from edgeasync.cli.model import export_run  # noqa: PLC0415

    export_run(run, model, out, Printer(json=json), best=best)


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
    json: Json = False,
) -> None:
    """Show what became of every update of a run. Only reads the run's folder; the run's hub may be running."""
    from edgeasync.cli.replay import replay_run  # noqa: PLC0415

    replay_run(run, until, checkpoint, export, Printer(json=json))


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder of runs, or of one run.")] = Path("runs"),
    json: Json = False,
) -> None:
    """List the runs in a folder, or the checkpoints of one run: version, time of the last write, and problems."""
    from edgeasync.cli.runs import print_runs  # noqa: PLC0415

    print_runs(folder, Printer(json=json))


@keys_app.command("init")
def keys_init(keys: Keys = None, address: Reached = None, json: Json = False) -> None:
    """Make a hub's key, an allow-list, and an operator key for yourself."""
    from edgeasync.cli.keys import init_keys  # noqa: PLC0415

    init_keys(keys, address or [], Printer(json=json))


@keys_app.command("enrol")
def keys_enrol(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The device's name. The key replaces a former key of that name.")
    ],
    role: Annotated[str, typer.Option(help="What the key may do: device or operator.")] = "device",
    key: Annotated[
        str | None,
        typer.Option(metavar="PUBLIC_KEY", help="The device's own public key, to admit it without a token."),
    ] = None,
    address: Reached = None,
    valid_hours: Annotated[
        float | None, typer.Option(help="How long the token may be used; 168 at most. Without it ten minutes.")
    ] = None,
    keys: Keys = None,
    json: Json = False,
) -> None:
    """Print a token for one device to enrol with, once, within ten minutes. Or admit a public key."""
    from edgeasync.cli.keys import enrol  # noqa: PLC0415

    enrol(keys, name, Printer(json=json), role=role, key=key, addresses=address or [], valid_hours=valid_hours)


@keys_app.command("list")
def keys_list(keys: Keys = None, json: Json = False) -> None:
    """List admitted keys, revoked keys, and tokens that still work."""
    from edgeasync.cli.keys import list_keys  # noqa: PLC0415

    list_keys(keys, Printer(json=json))


@keys_app.command("revoke")
def keys_revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The device or person whose key to revoke.")],
    keys: Keys = None,
    json: Json = False,
) -> None:
    """Revoke a key. A running hub closes its connection within a second."""
    from edgeasync.cli.keys import revoke  # noqa: PLC0415

    revoke(keys, name, Printer(json=json))


@keys_app.command("pending")
def keys_pending(keys: Keys = None, json: Json = False) -> None:
    """List unknown keys that asked a hub with --knocking for admission."""
    from edgeasync.cli.keys import list_pending  # noqa: PLC0415

    list_pending(keys, Printer(json=json))


@keys_app.command("accept")
def keys_accept(
    fingerprint: Annotated[
        str,
        typer.Argument(metavar="FINGERPRINT", help="The key's fingerprint, as 'pending' and the agent show it."),
    ],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The device's name. The key replaces a former key of that name.")
    ],
    keys: Keys = None,
    json: Json = False,
) -> None:
    """Admit a key that asked for admission."""
    from edgeasync.cli.keys import accept  # noqa: PLC0415

    accept(keys, fingerprint, name, Printer(json=json))


@keys_app.command("refuse")
def keys_refuse(
    fingerprint: Annotated[
        str, typer.Argument(metavar="FINGERPRINT", help="The key's fingerprint, as 'pending' shows it.")
    ],
    keys: Keys = None,
    json: Json = False,
) -> None:
    """Refuse a key that asked for admission: 'pending' no longer shows it."""
    from edgeasync.cli.keys import refuse  # noqa: PLC0415

    refuse(keys, fingerprint, Printer(json=json))


@service_app.command("install")
def service_install(
    kind: Kind,
    settings: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE.toml", help="Its settings, which are copied [default: those of an earlier install]."
        ),
    ] = None,
    name: UnitName = None,
    root: Annotated[
        Path,
        typer.Option(help="Install into the system in this folder, such as a mounted card, and start nothing."),
    ] = Path("/"),
    no_start: Annotated[
        bool, typer.Option("--no-start", help="Do not start it now, only at the next boot.")
    ] = False,
    json: Json = False,
) -> None:
    """Write the unit and its settings, and start it: now and at every boot. A second time changes nothing.

    As root for the machine, under the user edgeasync in /var/lib/edgeasync. Else for the user who calls, in
    ~/.local/share/edgeasync.
    """
    from edgeasync.cli.service import install_service  # noqa: PLC0415

    install_service(kind, settings, name, root, Printer(json=json), start=not no_start)


@service_app.command("remove")
def service_remove(
    kind: Kind,
    name: UnitName = None,
    root: Annotated[Path, typer.Option(help="Remove from the system in this folder.")] = Path("/"),
    purge: Annotated[
        bool,
        typer.Option("--purge", help="Delete settings, keys and state, too; with the last unit also the user."),
    ] = False,
    json: Json = False,
) -> None:
    """Stop it, and delete its unit. Settings, keys and state stay."""
    from edgeasync.cli.service import remove_service  # noqa: PLC0415

    remove_service(kind, name, root, Printer(json=json), purge=purge)


@service_app.command("status")
def service_status(kind: Kind, name: UnitName = None, json: Json = False) -> None:
    """Show whether it runs, what it says of itself, and how often it was restarted."""
    from edgeasync.cli.service import print_service_status  # noqa: PLC0415

    print_service_status(kind, name, Printer(json=json))


@service_app.command("logs")
def service_logs(
    kind: Kind,
    name: UnitName = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show new lines as they come.")] = False,
    lines: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many of the last lines.")] = 50,
) -> None:
    """Show its lines in systemd's journal."""
    from edgeasync.cli.service import show_logs  # noqa: PLC0415

    show_logs(kind, name, lines, follow=follow)


@service_app.command("upgrade")
def service_upgrade(
    kind: Kind,
    source: Source = "edgeasync",
    name: UnitName = None,
    timeout_s: Annotated[float, typer.Option(min=1.0, max=3600.0, help="Seconds for it to come up.")] = 120.0,
    json: Json = False,
) -> None:
    """Install a new version beside the old one, and switch to it. Switch back if the agent does not join."""
    from edgeasync.cli.service import upgrade_service  # noqa: PLC0415

    upgrade_service(kind, source, name, timeout_s, Printer(json=json))


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="The agent's settings, a TOML file.")] = None,
    hub: Annotated[
        list[str] | None, typer.Option(help="The hub's address, tcp://HOST:PORT. May be repeated.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="This device's data: .npz or .csv.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="GRAPH.onnx",
            help="A training graph, to time a step [default: the one that the hub sent last, if there is one].",
        ),
    ] = None,
    device_id: Annotated[str | None, typer.Option(help="This device's name [default: the host's name].")] = None,
    state: Annotated[
        str | None, typer.Option(help="The agent's state folder [default: ~/.local/state/edgeasync/DEVICE_ID].")
    ] = None,
    provider: Annotated[
        str | None, typer.Option(help="Execution provider: auto, cpu, cuda or tensorrt [default: auto].")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Speak to a hub beyond this machine without keys.")
    ] = False,
    root: Annotated[Path, typer.Option(help="Read /sys, /proc and /run below this folder.")] = Path("/"),
    json: Json = False,
) -> None:
    """Look at this device: machine, state, hub, data and speed. A line each: ok, warn or fail, and what to do."""
    from edgeasync.cli.doctor import run_doctor  # noqa: PLC0415

    flags: dict[str, Any] = {
        "hub": hub or None, "data": data, "device_id": device_id, "state": state, "provider": provider,
        "insecure": insecure or None,
    }  # fmt: skip
    run_doctor(config, _given(flags), model, root, Printer(json=json))


@app.command()
def bundle(
    out: Annotated[Path, typer.Option(help="A new folder for the wheels and install.sh.")],
    platform: Annotated[str, typer.Option(help="For which board: pi, jetson or x86.")],
    source: Source = "edgeasync",
    python: Annotated[str, typer.Option(help="The board's Python: 3.11, 3.12 or 3.13.")] = "3.11",
    extras: Annotated[str, typer.Option(help="Extras to include, such as hub,zstd.")] = "",
    json: Json = False,
) -> None:
    """Download all that a board needs into a folder, to install there without a network: sh OUT/install.sh."""
    from edgeasync.cli.service import bundle_wheels  # noqa: PLC0415

    bundle_wheels(source, platform, python, out, Printer(json=json), extras=extras)


def _graph_flags(
    loss: str | None, train: list[str] | None, freeze: list[str] | None, output: str | None, target: str | None
) -> dict[str, Any]:
    """Return the settings of a training graph that were given."""
    return _given(
        {"loss": loss, "train": train or None, "freeze": freeze or None, "output": output, "target": target}
    )


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        sys.stdout.write(f"edgeasync {VERSION}, Python {platform.python_version()}\n")
        raise typer.Exit


def main() -> None:
    """Run the command line, and end the process with its exit code."""
    # Until a command takes Ctrl-C for itself it ends the process at once, without a traceback from some import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = run_command()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # All is written and closed. On the long way out a training thread, or one of OpenBLAS's, can hang the process.
    os._exit(code)


def run_command() -> int:
    """Run the command of `sys.argv`; return its exit code. A user's mistake becomes one line on standard error."""
    try:
        app()
    except errors.EdgeAsyncError as error:
        tell(f"edgeasync: {visible(' '.join(str(error).split()))}")
        return error.exit_code
    except PermissionError as error:
        if error.filename is None:
            raise
        cure = "run this as the user whose it is, or change its rights"
        tell(f"edgeasync: {visible(str(error.filename))}: {error.strerror}; {cure}")
        return errors.StorageError.exit_code
    except SystemExit as ended:
        code = ended.code or 0
        return code if isinstance(code, int) else 1
    return 0
