"""A hub ships an ONNX training graph; an agent that knows nothing but the hub and its data trains by it."""

import json
import signal

import numpy as np
import pytest
from onnx import numpy_helper

from edgeasync.durable.files import replace_file
from edgeasync.durable.run_folder import FORWARD_FILE, MODEL_FILE, TRAINING_FILE
from tests.support.models.graphs import HostileHub, forward_model, plain_graph
from tests.support.programs.command_line import CONFIG, GRAPH, MISMATCH, mistake
from tests.support.programs.imported_modules import HEAVY, REPORT_MODULES, modules_of
from tests.support.programs.processes import free_address, trained, without_onnx

pytestmark = pytest.mark.process

MODEL_TABLE = 'kind = "onnx"\nfile = "forward.onnx"'
LISTEN = ("--bind", "tcp://127.0.0.1:*", "--run", "run")


@pytest.fixture
def forward(commands):
    """Write a forward model where the commands run."""
    path = commands.folder / "forward.onnx"
    path.write_bytes(forward_model())
    return path


def start_hub(commands, *arguments):
    hub = commands.start("hub", *arguments, *LISTEN, "--json")
    return hub, hub.wait_for("listening")["detail"]


# -- what goes well --------------------------------------------------------------------------------------------


def test_a_hub_needs_a_model_and_an_agent_needs_a_hub_and_data(commands, forward):
    hub, address = start_hub(commands, "--model", forward, "--loss", "cross_entropy")
    agent = commands.agent(address, "pi")
    assert "fetched" in agent.wait_for("graph")["detail"]
    trained(address, 20, "pi")

    agent.signal(signal.SIGTERM)
    assert agent.wait() == 0
    again = commands.agent(address, "pi")
    assert "from the cache" in again.wait_for("graph")["detail"]
    status = trained(address, 5, "pi")
    assert status["messages_accepted"]["fetchgraph"] == 1

    hub.signal(signal.SIGTERM)
    assert hub.wait() == 0
    assert hub.stderr == ""
    run = commands.folder / "run"
    assert (run / FORWARD_FILE).read_bytes() == forward.read_bytes()
    assert (run / MODEL_FILE).exists()
    kept = list((commands.folder / "pi" / "graphs").iterdir())
    assert [file.read_bytes() for file in kept] == [(run / TRAINING_FILE).read_bytes()]


def test_an_agent_goes_on_with_a_hub_that_was_started_again(commands, forward):
    address = free_address()
    settings = commands.settings(bind=address, model=MODEL_TABLE)
    hub, _ = commands.hub(settings)
    agent = commands.agent(address, "pi")
    trained(address, 5, "pi")
    hub.kill()
    commands.hub(settings)
    agent.wait_for("joined", count=2)
    assert "fetchgraph" not in trained(address, 5, "pi")["messages_accepted"]


def test_an_agent_ends_when_the_hub_ships_another_graph(commands, forward):
    address = free_address()
    settings = commands.settings(bind=address, model=MODEL_TABLE)
    hub, _ = commands.hub(settings)
    agent = commands.agent(address, "pi")
    trained(address, 5, "pi")
    hub.kill()
    commands.hub(
        commands.settings(
            bind=address,
            model=f'{MODEL_TABLE}\nloss = {{ kind = "cross_entropy", label_smoothing = 0.1 }}',
            name="other",
        )
    )
    assert agent.wait() == 5
    assert "start the agent again" in agent.stderr


def test_a_damaged_cache_is_fetched_anew(commands, forward):
    _, address = start_hub(commands, "--model", forward)
    agent = commands.agent(address, "pi")
    agent.wait_for("graph")
    agent.kill()
    (file,) = (commands.folder / "pi" / "graphs").iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"?")
    again = commands.agent(address, "pi")
    assert "damaged" in again.wait_for("warning")["detail"]
    assert "fetched" in again.wait_for("graph")["detail"]
    trained(address, 5, "pi")
    assert file.read_bytes() == content


def test_a_cache_that_cannot_be_written_costs_a_warning(commands, forward):
    _, address = start_hub(commands, "--model", forward)
    (commands.folder / "pi").mkdir(0o700)
    replace_file(commands.folder / "pi" / "graphs", b"")
    agent = commands.agent(address, "pi")
    assert "downloading the graph again" in agent.wait_for("warning")["detail"]
    assert "cannot be written" in agent.wait_for("warning", count=2)["detail"]
    trained(address, 5, "pi")


def test_a_settings_file_may_name_the_model_and_flags_win_over_it(commands, forward):
    settings = commands.settings(model=f'{MODEL_TABLE}\nloss = "mse"')
    _, address = start_hub(commands, settings, "--loss", "cross_entropy", "--train", "head.*")
    agent = commands.agent(address, "pi")
    agent.wait_for("graph")
    status = trained(address, 5, "pi")
    assert status["parameters"] == 16 * 3 + 3


def test_a_graph_larger_than_a_piece_travels_in_pieces(commands, forward):
    forward.write_bytes(forward_model(hidden=20_000))
    more = '[limits]\npiece_bytes = "64 KiB"\n'
    settings = commands.settings(model=f'{MODEL_TABLE}\ntrain = ["head.*"]', more=more)
    _, address = start_hub(commands, settings)
    agent = commands.agent(address, "pi")
    agent.wait_for("graph")
    status = trained(address, 3, "pi")
    assert status["messages_accepted"]["credit"] > 8


def test_an_agent_that_trains_a_graph_imports_no_onnx(commands, forward):
    settings = commands.settings(model=MODEL_TABLE, hub="stop = { updates = 20 }")
    _, address = start_hub(commands, settings)
    program = REPORT_MODULES + "from edgeasync.cli.main import main; main()"
    modules = modules_of(commands.agent(address, "small", program=("-c", program)))
    assert "onnxruntime" in modules
    assert not modules.intersection(HEAVY)


# -- what a device refuses -------------------------------------------------------------------------------------


def external():
    tensor = numpy_helper.from_array(np.ones(1, np.float32), "w")
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "/etc/passwd"
    tensor.data_location = 1
    return plain_graph(initializers=[tensor])


SOUND = plain_graph()
HOSTILE = {
    "a foreign operator": (plain_graph("Evil"), {}, ["'suspect'", "Evil", "not supported on devices"]),
    "a foreign domain": (plain_graph(domain="evil"), {}, ["'suspect'", "'evil'"]),
    "a tensor in another file": (external(), {}, ["another file"]),
    "no graph at all": (b"\x00" * 100, {}, ["know"]),
    "another fingerprint": (SOUND, {"announced": "0" * 64}, ["fingerprint", "do not trust"]),
    "another length": (SOUND, {"announced_bytes": len(SOUND) + 1}, ["another graph", "do not trust"]),
    "too large": (SOUND, {"announced_bytes": 1 << 40}, [str(1 << 40), "graph_bytes_max"]),
}


@pytest.mark.parametrize(("graph", "announced", "hint"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_hub(commands, graph, announced, hint):
    data = commands.data("data.npz")
    with HostileHub(graph, **announced) as hub:
        arguments = ["agent", "--hub", hub.address, "--data", data, "--device-id", "pi", "--state", "state"]
        mistake(commands, GRAPH, *hint, arguments=arguments)
    assert hub.fetched == (0 if announced.get("announced_bytes") == 1 << 40 else 1)


# -- what a person gets wrong ----------------------------------------------------------------------------------


def test_a_hub_without_a_model(commands):
    mistake(commands, CONFIG, "--model", "[model]", arguments=["hub", *LISTEN])
    mistake(commands, CONFIG, "--model FILE.onnx", arguments=["hub", "--loss", "mse", *LISTEN])
    mistake(commands, CONFIG, "none.onnx", "no such file", arguments=["hub", "--model", "none.onnx", *LISTEN])


def test_a_loss_that_is_none(commands, forward):
    mistake(
        commands,
        CONFIG,
        "--loss",
        "cross_entropy",
        arguments=["hub", "--model", forward, "--loss", "guess", *LISTEN],
    )


def test_a_model_that_is_none(commands, forward):
    forward.write_bytes(b"not a model")
    mistake(commands, GRAPH, "forward.onnx", arguments=["hub", "--model", forward, *LISTEN])


def test_a_run_goes_on_with_another_loss_but_not_with_another_model(commands, forward):
    for flags in ([], ["--loss", "huber"]):
        hub, _ = start_hub(commands, "--model", forward, *flags)
        hub.kill()
    some = ["hub", "--model", forward, "--train", "head.*", *LISTEN]
    mistake(commands, MISMATCH, "another", "run folder", arguments=some)
    forward.write_bytes(forward_model(hidden=17))
    mistake(commands, MISMATCH, "another", "run folder", arguments=["hub", "--model", forward, *LISTEN])


def test_a_hub_without_onnx_says_what_to_install(commands, forward):
    program = without_onnx(commands)
    hub = commands.start("hub", "--model", forward, *LISTEN, program=("-c", program))
    assert hub.wait() == CONFIG
    assert "pip install 'edgeasync[hub]'" in hub.stderr
    assert "Traceback" not in hub.stderr


def test_data_that_does_not_fit_the_graph(commands, forward):
    _, address = start_hub(commands, "--model", forward)
    data = commands.data("wide.npz", inputs=9)
    arguments = ["agent", "--hub", address, "--data", data, "--device-id", "pi", "--state", "state"]
    mistake(commands, 3, "wide.npz", "(9,)", "(8,)", arguments=arguments)


def test_a_provider_that_is_not_there(commands):
    arguments = ["agent", "--hub", free_address(), "--data", "x.npz", "--provider", "abacus"]
    mistake(commands, CONFIG, "provider", "abacus", arguments=arguments)


def test_events_are_lines_of_json(commands, forward):
    _, address = start_hub(commands, "--model", forward)
    agent = commands.agent(address, "pi")
    agent.wait_for("graph")
    assert all(json.loads(line)["event"] for line in agent.lines)
