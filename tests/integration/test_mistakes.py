"""What a person gets wrong is answered in one line that says what to do, and by an exit code to rely on.

Commands run in this process, but for the four at the end that hold the process itself.
"""

import json
import os
import signal
import threading

import numpy as np
import psutil
import pytest
import zmq

from edgeasync import nn
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Status
from tests.support.programs.command_line import (
    ADDRESS,
    CONFIG,
    DATA,
    FILES,
    MISMATCH,
    NO_HUB,
    PROTOCOL,
    UNFIT,
    Told,
    assert_told,
    mistake,
)
from tests.support.programs.processes import MODEL_TABLE, Commands, free_address, trained, without_rights

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Return the address of a hub that serves all tests of this module."""
    with Commands(tmp_path_factory.mktemp("live")) as commands:
        yield commands.hub(commands.settings())[1]


# -- a hub's settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toml", "hint"),
    [
        ("", ["missing key", "`model`"]),
        ("[model]\ninputs = 8\nclasses = 3", ["model", "missing key `kind`"]),
        ('[model]\nkind = "softmax"\ninputs = "8"\nclasses = 3', ["model.inputs", "expected `int`"]),
        (
            f"[model]\n{MODEL_TABLE}\n[hub]\nbindd = 'tcp://127.0.0.1:*'",
            ["hub", "unknown key `bindd`; did you mean bind?"],
        ),
        (f"[model]\n{MODEL_TABLE}\n[liveness]\nport = 1", ["`port`; choose from heartbeat_s, lease_s"]),
        ('[model]\nkind = "softmx"', ["model.kind", "'softmx' is not known; did you mean softmax?"]),
        (
            f"[model]\n{MODEL_TABLE}\n[policy]\noptimizer = [{{ kind = 'sgd' }}, {{ kind = 'lion' }}]",
            ["policy.optimizer[1].kind", "'lion' is not known; choose from sgd, nesterov"],
        ),
        (f"[model]\n{MODEL_TABLE}\n[hub]\nstop = {{ updates = 0 }}", ["hub.stop.updates", ">= 1"]),
        (f"[model]\n{MODEL_TABLE}\n[limits]\nparameters_max = 5", ["27 parameters", "limits.parameters_max = 5"]),
        (f"[model]\n{MODEL_TABLE}\n[liveness]\nlease_s = 1.0", ["liveness", "longer than heartbeat_s"]),
        (f"[model]\n{MODEL_TABLE}\n[codec]\npush = 'gzip'", ["codec", "'gzip'", "identity, float16"]),
        ("[model\nkind = 3", ["not valid TOML", "line 1"]),
    ],
)
def test_wrong_settings(commands, toml, hint):
    path = commands.folder / "wrong.toml"
    path.write_text(toml)
    mistake(commands, CONFIG, *hint, arguments=["hub", path, "--bind", "tcp://127.0.0.1:*"])


@pytest.mark.parametrize(
    ("toml", "hint"),
    [
        ("[agent]\ndevice = 'pi'", ["agent", "unknown key `device`; did you mean device_id"]),
        ("[agent]\nspool = 'fully'", ["agent.spool", "'fully' is not known; did you mean full?"]),
    ],
)
def test_wrong_settings_of_an_agent(commands, toml, hint):
    path = commands.folder / "wrong.toml"
    path.write_text(toml)
    mistake(commands, CONFIG, *hint, arguments=["agent", path])


def test_settings_that_are_not_there(commands):
    mistake(commands, CONFIG, "nowhere.toml", "no such file", arguments=["hub", "nowhere.toml"])
    mistake(commands, CONFIG, "nowhere.toml", "no such file", arguments=["agent", "nowhere.toml"])


# -- addresses -------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken(commands, live):
    settings = commands.settings()
    mistake(commands, ADDRESS, live, "in use", "--bind", arguments=["hub", settings, "--bind", live])


def test_a_hub_without_keys_at_which_devices_are_to_knock(commands):
    """Red before: it started, and no device ever knocked."""
    settings = commands.settings()
    mistake(
        commands, CONFIG, "knocking (--knocking) needs keys (--keys)", arguments=["hub", settings, "--knocking"]
    )


def test_a_hub_that_nobody_could_reach(commands):
    arguments = ["hub", commands.settings(), "--bind", "inproc://hub"]
    mistake(commands, ADDRESS, "inproc://hub", "tcp://HOST:PORT", arguments=arguments)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:5555", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:99999", ""]
)
def test_an_address_that_is_none(commands, address):
    data = commands.data("data.npz")
    settings = commands.settings()
    mistake(commands, ADDRESS, "tcp://HOST:PORT", arguments=["hub", settings, "--bind", address])
    mistake(commands, ADDRESS, "tcp://HOST:PORT", arguments=["agent", "--hub", address, "--data", data])
    mistake(commands, ADDRESS, "tcp://HOST:PORT", arguments=["status", "--hub", address])


@pytest.mark.parametrize(
    "answer", [[b"junk"], [b"{}", b"{}"], [wire.encode(Status()), b"{}"], [wire.encode(Status())]]
)
def test_a_server_that_is_no_hub(commands, answer):
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.bind("tcp://127.0.0.1:*")
    address = server.get_string(zmq.LAST_ENDPOINT)

    def serve():
        peer, _ = server.recv_multipart()
        server.send_multipart([peer, *answer])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        mistake(commands, PROTOCOL, address, "not an edgeasync hub", arguments=["status", "--hub", address])
    finally:
        thread.join()
        context.destroy(0)


def test_a_hub_that_is_not_there(commands):
    address = free_address()
    arguments = ["status", "--hub", address, "--timeout-s", "0.5"]
    mistake(commands, NO_HUB, address, "edgeasync hub", arguments=arguments)
    mistake(commands, NO_HUB, address, "edgeasync hub", arguments=[*arguments, "--json"])


# -- a run's folder --------------------------------------------------------------------------------------------


def test_a_run_of_another_model(commands):
    hub, _ = commands.hub(commands.settings())
    hub.signal(15)
    assert hub.wait() == 0
    other = commands.settings(model='kind = "softmax"\ninputs = 9\nclasses = 3')
    mistake(commands, MISMATCH, "belongs to another model", "choose another run folder", arguments=["hub", other])


def test_a_run_that_another_hub_uses(commands):
    settings = commands.settings()
    commands.hub(settings)
    mistake(commands, FILES, "run-hub", "another hub", "--run", arguments=["hub", settings])


def test_a_model_that_could_not_be_written_at_the_end(commands):
    hub, _ = commands.hub(commands.settings())
    (commands.folder / "run-hub" / "model.safetensors.part").mkdir()
    hub.signal(15)
    assert hub.wait() == FILES
    assert "stopped" not in hub.names()
    assert "model.safetensors: cannot be written" in hub.stderr


def test_a_run_whose_model_is_damaged(commands):
    (commands.folder / "run-hub").mkdir()
    (commands.folder / "run-hub" / "model.safetensors").write_bytes(b"\xff" * 100)
    mistake(commands, FILES, "model.safetensors", "move the file away", arguments=["hub", commands.settings()])


def test_what_no_hub_has_made_in_a_runs_folder_hides_no_run(commands):
    hub, _ = commands.hub(commands.settings())
    hub.signal(signal.SIGTERM)
    assert hub.wait() == 0
    run = commands.folder / "run-hub"
    (run / "itself").symlink_to("itself")
    (run / "lock").unlink()
    os.mkfifo(run / "lock")  # to open it waits for a writer
    told = commands.run("runs", ".", "--json")
    assert json.loads(told.stdout)["trouble"] == []
    assert commands.run("replay", "run-hub").returncode == 0


@pytest.mark.parametrize("recovery", ["best", "checkpoint-0000000001-1"])
def test_going_back_in_a_folder_that_has_no_checkpoint(commands, recovery):
    """As where the name of the run is mistyped: the fleet would train from the first values on."""
    arguments = ["hub", commands.settings(), "--run", "runs/fisrt", "--recovery", recovery]
    hint = ["runs/fisrt: contains no checkpoint to resume from", "--run", "--recovery"]
    mistake(commands, FILES, *hint, arguments=arguments)
    assert not (commands.folder / "runs").exists()


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_run_that_cannot_be_written(commands, place):
    (commands.folder / "file").write_text("")
    arguments = ["hub", commands.settings(), "--run", place]
    mistake(commands, FILES, place, "--run", arguments=arguments)


def test_a_demo_in_a_run_that_exists(commands):
    (commands.folder / "old").mkdir()
    mistake(commands, FILES, "exists already", "--run", arguments=["demo", "--run", "old"])


# -- an agent's data and identity ------------------------------------------------------------------------------


def test_an_agent_without_data(commands):
    mistake(commands, CONFIG, "--data", arguments=["agent", "--hub", free_address()])


@pytest.mark.parametrize("name", ["two words", "new\nline", "../up"])
def test_a_device_id_that_is_none(commands, name):
    data = commands.data("data.npz")
    arguments = ["agent", "--hub", free_address(), "--data", data, f"--device-id={name}"]
    mistake(commands, CONFIG, "--device-id", arguments=arguments)


@pytest.mark.parametrize("flag", ["--bandwidth-bytes-per-s-max", "--bytes-per-day-max"])
def test_a_number_of_bytes_beyond_all_reason(commands, flag):
    arguments = ["agent", "--hub", free_address(), "--data", "data.npz", flag, "9" * 5000]
    mistake(commands, CONFIG, "is not a size", arguments=arguments)


def test_data_that_is_not_there(commands):
    arguments = ["agent", "--hub", free_address(), "--state", "state", "--data"]
    mistake(commands, DATA, "none.npz", "no such file", arguments=[*arguments, "none.npz"])
    mistake(commands, DATA, ".parquet", ".npz or .csv", arguments=[*arguments, "data.parquet"])
    mistake(commands, DATA, "without suffix", ".npz or .csv", arguments=[*arguments, commands.folder])


def test_data_that_does_not_fit_the_hubs_model(commands, live):
    wide = commands.data("wide.npz", inputs=9)
    many = commands.data("many.npz", classes=4)
    arguments = ["agent", "--hub", live, "--device-id", "misfit", "--state", "state", "--data"]
    mistake(commands, DATA, "9 features", "expects 8", "same features", arguments=[*arguments, wide])
    mistake(commands, DATA, "label 3", "3 classes", "from 0", arguments=[*arguments, many])


def test_tokens_that_the_hubs_model_does_not_know(commands):
    """Only a step finds out; it ends the agent as other wrong data do."""
    layers = nn.Sequential(nn.Embedding(10, 4), nn.MeanOverTime(), nn.Linear(4, 3))
    nn.save(layers, commands.folder / "forward.onnx", (8,))
    hub = commands.start("hub", "--model", "forward.onnx", "--bind", "tcp://127.0.0.1:*", "--json")
    address = hub.wait_for("listening")["detail"]
    np.savez(commands.folder / "tokens.npz", x=np.full((50, 8), 10), y=np.arange(50) % 3)
    arguments = ["agent", "--hub", address, "--data", "tokens.npz", "--device-id", "pi", "--state", "state"]
    mistake(commands, DATA, "idx=10", "number tokens", arguments=arguments)


def test_a_model_that_differs_from_the_hubs(commands, live):
    data = commands.data("data.npz")
    (commands.folder / "agent.toml").write_text('[model]\nkind = "softmax"\ninputs = 8\nclasses = 4\n')
    device = ["--data", data, "--device-id", "stubborn", "--state", "state"]
    arguments = ["agent", "agent.toml", "--hub", live, *device]
    mistake(commands, MISMATCH, "differs from the hub's", "[model]", arguments=arguments)


def test_a_state_that_cannot_be_used(commands):
    data = commands.data("data.npz")
    (commands.folder / "file").write_text("")
    (commands.folder / "torn").mkdir()
    (commands.folder / "torn" / "identity.json").write_text('{"device_id": ')
    arguments = ["agent", "--hub", free_address(), "--data", data, "--device-id", "a", "--state"]
    mistake(commands, FILES, "file", "--state", arguments=[*arguments, "file"])
    mistake(commands, FILES, "identity.json", "delete it", arguments=[*arguments, "torn"])


# -- a home that is not there ----------------------------------------------------------------------------------

NOBODY = "~no-such-user/x"


@pytest.mark.parametrize(
    "arguments",
    [
        ["hub", "hub.toml", "--run", NOBODY],
        ["hub", "--model", NOBODY + ".onnx"],
        ["agent", "--hub", "tcp://127.0.0.1:1", "--data", NOBODY + ".npz"],
        ["agent", "--hub", "tcp://127.0.0.1:1", "--data", "data.npz", "--state", NOBODY],
        ["peer", "peer.toml", "--data", "data.npz", "--peers", "peers.toml", "--out", NOBODY + ".onnx"],
        ["keys", "list", "--keys", NOBODY],
        ["doctor", "--data", "data.npz", "--model", NOBODY + ".onnx", "--state", "state"],
        ["model", "inspect", NOBODY + ".onnx"],
    ],
    ids=" ".join,
)
def test_a_path_below_a_home_that_is_not_there(commands, arguments):
    folder = commands.folder
    commands.data("data.npz")
    commands.settings()
    onnx_file = folder / "model.onnx"
    onnx_file.write_bytes(nn.to_onnx(nn.Sequential(nn.Linear(8, 3)), (8,)).SerializeToString())
    table = f"[model]\n{MODEL_TABLE}\n[peer]\nstate = 'state'\n"
    (folder / "peer.toml").write_text(f"{table}peers = '{NOBODY}.toml'\n")
    told = commands.run(*arguments)
    said = told.stdout + told.stderr
    assert "Traceback" not in said
    assert NOBODY in said
    assert "unknown home folder; use an absolute path" in said
    assert told.returncode == (UNFIT if arguments[0] == "doctor" and "--model" in arguments else CONFIG)


# -- the command line itself -----------------------------------------------------------------------------------


def say(commands, *arguments, **options):
    """Run a command as a process of its own, as a person does; return what it said."""
    command = commands.start(*arguments, **options)
    returncode = command.wait()
    return Told(returncode, "\n".join(command.lines), command.stderr)


@pytest.mark.parametrize("kind", ["agent", "hub", "peer"])
def test_a_service_is_not_installed_with_settings_that_it_would_refuse(commands, kind):
    settings = commands.folder / "board.toml"
    settings.write_text(f"[{kind}]\nhbu = 'tcp://hub:5555'")
    card = commands.folder / "card"
    card.mkdir()
    arguments = ["service", "install", kind, settings, "--root", card]
    mistake(commands, CONFIG, "board.toml", "unknown key `hbu`", arguments=arguments)
    assert not list(card.iterdir())


@pytest.mark.parametrize("root", ["typo", "file", "loop"])
@pytest.mark.parametrize("verb", ["install", "remove"])
def test_a_service_goes_into_a_folder_that_is_there(commands, verb, root):
    (commands.folder / "file").touch()
    (commands.folder / "loop").symlink_to("loop")
    mistake(
        commands, CONFIG, f"--root {root}: no such folder", arguments=["service", verb, "agent", "--root", root]
    )
    assert not (commands.folder / "typo").exists()


def test_the_unit_of_a_peer_has_settings_that_it_can_run_by(commands):
    card, settings = commands.folder / "card", commands.folder / "board.toml"
    card.mkdir()
    service = ("service", "install", "peer")
    settings.write_text('[peer]\ndata = "a.npz"\n')
    mistake(commands, CONFIG, "board.toml: no peers are set", arguments=(*service, settings, "--root", card))
    assert not list(card.iterdir())
    settings.write_text('[peer]\ndata = "a.npz"\npeers = "peers.toml"\n')
    unit = card / "etc/systemd/system/edgeasync-peer.service"
    for given in ((settings,), ()):
        assert commands.run(*service, *given, "--root", card).returncode == 0
        assert "peer peer.toml\n" in unit.read_text()


@pytest.mark.parametrize("table", ["peer", "peers", "local"])
@pytest.mark.parametrize("command", ["agent", "doctor"])
def test_a_peers_table_in_an_agents_file_leads_to_the_command(commands, command, table):
    (commands.folder / "board.toml").write_text(f"[{table}]\n")
    said = f"board.toml: unknown key `{table}`; ", "a device without a hub is a peer", "'edgeasync peer'"
    mistake(commands, CONFIG, *said, arguments=(command, "board.toml"))


def test_a_service_gets_settings_that_can_be_read_but_once(commands):
    text, card = '[agent]\nhub = "tcp://hub:5555"\n', commands.folder / "card"
    card.mkdir()
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    told = commands.run("service", "install", "agent", f"/dev/fd/{reader}", "--root", card)
    os.close(reader)
    assert (told.returncode, told.stderr) == (0, "")
    assert (card / "var/lib/edgeasync/agent.toml").read_text() == text


def test_a_command_leaves_nothing_open_in_this_process(commands, live):
    """No event loop and no context of ZeroMQ, each of which is several files; of threads every run makes sure."""
    wide = commands.data("wide.npz", inputs=9)
    agent = ["agent", "--hub", live, "--device-id", "misfit", "--state", "state", "--data", wide]
    counts = []
    for _ in range(3):
        mistake(commands, ADDRESS, "in use", arguments=["hub", commands.settings(), "--bind", live])
        mistake(commands, DATA, "9 features", arguments=agent)
        assert commands.run("status", "--hub", live).returncode == 0
        counts.append((psutil.Process().num_fds(), signal.getsignal(signal.SIGTERM)))
    assert counts[1] == counts[2]  # the first one has opened what stays, such as the source of random numbers


def test_a_mistake_ends_the_process_with_its_exit_code(commands):
    assert_told(say(commands, "hub", "nowhere.toml"), CONFIG, "nowhere.toml", "no such file")


def test_a_folder_of_another_user_is_answered_in_one_line(commands):
    closed = commands.folder / "closed"
    closed.mkdir(mode=0)
    command = commands.start("replay", closed / "run", under=without_rights())
    returncode = command.wait()
    told = Told(returncode, "\n".join(command.lines), command.stderr)
    assert_told(told, FILES, "closed/run: Permission denied", "as the file's owner")


def closing(*descriptors):
    """Return the command under which a process starts without these of its standard streams."""
    return ("sh", "-c", f'exec "$@" {" ".join(f"{number}>&-" for number in descriptors)}', "sh")


@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1, 2]])
def test_a_closed_stream_changes_no_exit_code(commands, closed):
    for arguments, code in ((["policies"], 0), (["policies", "--json"], 0), (["hub", "nowhere.toml"], CONFIG)):
        command = commands.start(*arguments, under=closing(*closed))
        assert (command.wait(), "Traceback" in command.stderr) == (code, False)


def test_a_hub_and_an_agent_train_without_any_standard_stream(commands):
    address = free_address()
    hub = commands.start("hub", commands.settings(bind=address), under=closing(0, 1, 2))
    agent = commands.agent(address, "pi", under=closing(0, 1, 2))
    trained(address)
    for command in (agent, hub):
        command.signal(signal.SIGTERM)
        assert command.wait() == 0


FULL = ("sh", "-c", 'exec "$@" >/dev/full', "sh")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["hub", "--help"],
        ["policies"],
        ["policies", "--json"],
        ["runs", "."],
        ["keys", "init", "--keys", "keys"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_printed_is_told_in_one_line(commands, arguments):
    told = say(commands, *arguments, under=FULL)
    assert_told(told, FILES, "standard output: No space left on device", "free disk space")


def test_what_the_output_has_no_letter_for_is_escaped(commands):
    (commands.folder / "Łź").mkdir()
    told = say(commands, "runs", "Łź", under=("env", "PYTHONIOENCODING=latin-1"))
    assert told == (0, r"no runs in \u0141\u017a", "")


def test_a_run_whose_name_is_no_text_is_listed(commands):
    run = commands.folder / os.fsdecode(b"\xff")
    run.mkdir()
    (run / "hub.json").touch()
    told = commands.run("runs", ".", "--json")
    assert (json.loads(told.stdout)["name"], told.returncode) == (r"\udcff", 0)
    assert commands.run("runs", ".").stdout.splitlines()[1].startswith(r"\udcff")


@pytest.mark.parametrize(
    "arguments",
    [
        ["replay", "x" * 300],
        ["export", "x" * 300, "--out", "out.onnx"],
        ["bundle", "--platform", "pi", "--out", "file"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_path_that_cannot_be_is_answered_in_one_line(commands, arguments):
    (commands.folder / "file").write_text("")
    mistake(commands, FILES, arguments=arguments)


def test_wrong_usage_ends_the_process(commands):
    told = say(commands, "agents")
    assert (told.returncode, told.stderr) == (CONFIG, "edgeasync: no such command 'agents'; did you mean agent?\n")
