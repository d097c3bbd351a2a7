"""The flags of a command follow from the structs of its settings, and what they say is read like a file."""

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import inspect
from typer.main import get_command
from typer.testing import CliRunner

from edgeasync.cli.main import app
from edgeasync.cli.mistakes import Commands
from edgeasync.cli.settings_flags import FLAGS, apply_flags, model_of, named_by_flag
from edgeasync.config import ByteCount
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.device.throttle import ThrottleSection
from edgeasync.errors import ConfigError
from edgeasync.runtime.agent_settings import AgentSection
from edgeasync.runtime.hub_settings import HubSection
from edgeasync.runtime.peer_settings import PeerSection
from edgeasync.setting_keys import bare

COMMANDS = get_command(app).commands
WHOLE = {"hub": [HubSection], "agent": [AgentSection, DeviceLimits, ThrottleSection], "peer": [PeerSection]}


def options_of(command):
    return {option for parameter in Commands.whole(command, COMMANDS[command]).params for option in parameter.opts}


@pytest.mark.parametrize("command", WHOLE)
def test_every_key_that_fits_on_a_line_is_a_flag_of_the_same_name(command):
    keys = [
        field.encode_name
        for struct in WHOLE[command]
        for field in inspect.type_info(struct).fields
        if not isinstance(bare(field.type), inspect.StructType)
    ]
    assert {f"--{key.replace('_', '-')}" for key in keys} <= options_of(command)


def said_to_hub(monkeypatch, *arguments):
    found = []
    monkeypatch.setattr("edgeasync.cli.hub.run_hub", lambda config, start, _: found.append((config, start.said)))
    done = CliRunner().invoke(app, ["hub", *arguments])
    assert done.exit_code == 0, done.output
    return found[0]


@pytest.mark.parametrize(
    ("arguments", "file", "page"),
    [
        (["--page"], None, "127.0.0.1:8555"),
        (["--page", "hub.toml"], "hub.toml", "127.0.0.1:8555"),
        (["hub.toml", "--page", "*:80", "--json"], "hub.toml", "*:80"),
        (["--page=[::1]:*", "hub.toml"], "hub.toml", "[::1]:*"),
        (["--page", "--json", "hub.toml"], "hub.toml", "127.0.0.1:8555"),
        (["--page", "settings_of_my_hub"], "settings_of_my_hub", "127.0.0.1:8555"),
        (["--page", "0.0.0.0", "hub.toml"], "hub.toml", "0.0.0.0"),
        (["hub.toml", "--page", "8555"], "hub.toml", "8555"),
    ],
)
def test_an_address_after_a_flag_is_its_value_and_anything_else_is_not(
    monkeypatch, tmp_path, arguments, file, page
):
    monkeypatch.chdir(tmp_path)
    Path("settings_of_my_hub").touch()
    config, said = said_to_hub(monkeypatch, *arguments)
    assert (config and str(config), said["page"]) == (file, {"bind": page})


def test_flags_of_the_page_and_the_hub_with_the_same_key_are_told_apart(monkeypatch):
    flags = ["--bind", "tcp://127.0.0.1:1", "--page", "--page-hosts", "a", "--page-hosts", "b", "--page-insecure"]
    _, said = said_to_hub(monkeypatch, *flags, "--metrics", "127.0.0.1:1", "--no-insecure")
    assert said["hub"] == {"bind": "tcp://127.0.0.1:1", "insecure": False}
    assert said["page"] == {"bind": "127.0.0.1:8555", "hosts": ["a", "b"], "insecure": True}
    assert said["metrics"] == {"bind": "127.0.0.1:1"}


@pytest.mark.parametrize("flag", ["--page", "--metrics"])
@pytest.mark.parametrize("address", ["nowhere:0", "0.0.0.0", "8555", "hub.example.org", "*", "[::1]"])
def test_a_mistake_in_an_address_names_its_flag(flag, address):
    done = CliRunner().invoke(app, ["hub", "--model", "x.onnx", flag, address])
    assert f"{flag} is '{address}', which is not an address; use HOST:PORT" in str(done.exception)


@pytest.mark.parametrize("command", sorted(FLAGS))
def test_help_fits_and_says_what_each_flag_means(command):
    """No flag without words, no sentence that is cut, no link, nothing wider than a terminal."""
    told = CliRunner().invoke(app, [*command.split(), "--help"], terminal_width=80)
    assert told.exit_code == 0
    assert max(map(len, told.stdout.splitlines())) <= 80
    assert "..." not in told.stdout.replace("[OPTIONS]", "")
    assert "](" not in told.stdout


def test_an_agent_loads_nothing_of_a_hub():
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom edgeasync.cli.main import app\n"
        "CliRunner().invoke(app, ['agent', '--help'])\n"
        "print([name for name in sys.modules if name.startswith('edgeasync.core.hub') or 'hub_settings' in name])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def said(monkeypatch, *arguments):
    """Return what a command is told by its flags."""
    found = []
    monkeypatch.setattr("edgeasync.cli.agent.run_agent", lambda _config, flags, _printer: found.append(flags))
    done = CliRunner().invoke(app, ["agent", *arguments])
    assert done.exit_code == 0, done.output
    return found[0]


def test_flags_say_keys_of_their_tables(monkeypatch):
    told = said(
        monkeypatch, "--hub", "a", "--hub", "b", "--threads", "0", "--micro-batch-size", "16",
        "--bytes-per-day-max", "3000", "--bandwidth-bytes-per-s-max", "1 MB", "--insecure",
        "--cpu-share", "0.5", "--provider", "cpu",
    )  # fmt: skip
    assert told == {
        "agent": {
            "hub": ["a", "b"], "threads": 0, "micro_batch_size": 16, "insecure": True, "provider": "cpu",
        },
        "limits": {"bytes_per_day_max": 3000, "bandwidth_bytes_per_s_max": "1 MB"},
        "throttle": {"cpu_share": 0.5},
    }  # fmt: skip
    assert said(monkeypatch, "--micro-batch-size", "auto")["agent"] == {"micro_batch_size": "auto"}
    assert said(monkeypatch) == {"agent": {}, "limits": {}, "throttle": {}}
    assert said(monkeypatch, "--no-only-on-mains")["throttle"] == {"only_on_mains": False}


def test_a_flag_wins_over_the_file():
    before = DeviceLimits(local_steps_max=4, link_share=0.5)
    after = apply_flags(before, {"local_steps_max": 8, "graph_bytes_max": "1 MiB"})
    assert after == DeviceLimits(local_steps_max=8, link_share=0.5, graph_bytes_max=ByteCount(1 << 20))
    assert apply_flags(before, {}) is before
    peer = apply_flags(PeerSection(epochs=20), {"steps_max": 3})
    assert (peer.steps_max, peer.epochs) == (3, None)
    with pytest.raises(ConfigError, match="--steps-max and --epochs both limit the training"):
        apply_flags(PeerSection(), {"steps_max": 3, "epochs": 2})


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"link_share": 2.0}, "--link-share: expected `float` < 1.0"),
        ({"graph_bytes_max": "many"}, "--graph-bytes-max: 'many' is not a size"),
        ({"delay_steps": 5, "local_steps_max": 4}, "--delay-steps (5) must be at most --local-steps-max (4)"),
        ({"bandwidth_bytes_per_s_max": "1 kB"}, "--bandwidth-bytes-per-s-max must be at least 16 KiB"),
    ],
)
def test_a_mistake_names_the_flag(flags, told):
    with pytest.raises(ConfigError) as error:
        apply_flags(DeviceLimits(), flags)
    assert str(error.value).startswith(told)


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ("flags: codec = 'int5': not known", "--codec = 'int5': not known"),
        ("flags: epochs and steps_max say the same", "--epochs and --steps-max say the same"),
        ("flags: steps_max needs data, and the hub has none", "--steps-max needs data, and the hub has none"),
        ("hub.toml: the hub needs data for its codec", "hub.toml: the hub needs data for its codec"),
    ],
)
def test_only_a_key_is_named_as_a_flag_and_no_word_of_a_sentence(told, named):
    """Red before: with --hub and --data "the hub has none" became "the --hub has none"."""
    said = dict.fromkeys(("codec", "epochs", "steps_max", "hub", "data"))
    assert str(named_by_flag(ConfigError(told), said)) == named


def test_a_model_of_flags_takes_the_place_of_one_of_another_kind():
    assert model_of({"kind": "mlp", "inputs": 3}, {"file": "m.onnx"}) == {"kind": "onnx", "file": "m.onnx"}
    known = {"kind": "onnx", "file": "m.onnx", "loss": "mse"}
    assert model_of(known, {"loss": "l1"}) == known | {"loss": "l1"}
    with pytest.raises(ConfigError, match="add --model"):
        model_of(None, {"loss": "l1"})
