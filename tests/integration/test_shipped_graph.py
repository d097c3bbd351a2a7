"""A hub ships an ONNX training graph; an agent that knows nothing but the hub and its data trains by it."""

import signal

import numpy as np
import pytest
from onnx import numpy_helper

from edgeasync.durable.run_folder import FORWARD_FILE, MODEL_FILE, TRAINING_FILE
from edgeasync.graphs.source import with_forward
from tests.support.models.graphs import HostileHub, forward_model, plain_graph
from tests.support.programs.command_line import CONFIG, GRAPH, MISMATCH, mistake
from tests.support.programs.processes import free_address, trained, without_onnx

pytestmark = pytest.mark.process

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
    (graph,) = [file.read_bytes() for file in kept]
    assert with_forward(graph, forward.read_bytes()) == (run / TRAINING_FILE).read_bytes()


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


def test_a_provider_that_is_not_there(commands):
    arguments = ["agent", "--hub", free_address(), "--data", "x.npz", "--provider", "abacus"]
    mistake(commands, CONFIG, "provider", "abacus", arguments=arguments)
