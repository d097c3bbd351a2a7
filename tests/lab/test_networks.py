"""A hub and its devices in network namespaces, over links that are slow, lose packets and are cut.

At full size nothing is set for the sake of the links: liveness and codecs are those that every hub has by default.
"""

import contextlib
import json
import signal
import time

import pytest

from edgeasync.cli.demo import make_model
from edgeasync.durable.keys import HubKeys
from tests.support.boards.digits import write_digits
from tests.support.boards.network import Link, Network
from tests.support.size import repetitions

pytestmark = pytest.mark.process


ROUGH = Link(bit_per_s=20e6, delay_s=0.03, loss=0.01)
FAR = Link(bit_per_s=250e3, delay_s=0.6)
CNN = 'kind = "onnx"\nfile = "digits.onnx"'
SLOW_LEARNING = '[local]\noptimizer = [{ kind = "sgd", learning_rate = 0.0025 }]\n'
"""It takes two minutes with this, so that the link is cut twice."""

LONGEST_S = 1800.0
NEWS_OF_A_BREAK = {"lost", "rejoined", "reconnected", "disconnected", "unreachable", "quarantined"}


def perceptron(width):
    """Return the table of a model with two hidden layers."""
    return f'kind = "mlp"\ninputs = 64\nhidden = [{width}, {width}]\nclasses = 10'


@contextlib.contextmanager
def network_of(*links):
    """Make a network, or skip the test where it cannot be made."""
    try:
        network = Network(*links)
    except OSError as error:
        pytest.skip(f"no network can be made here: {error}")
    with network:
        yield network


class Training:
    """A hub with keys, and an agent at each other host, which enrols and has its part of the digits."""

    def __init__(self, commands, network, agents, *, model, stop, step_s, name="hub", more=""):
        self._commands, self._name = commands, name
        (commands.folder / "digits.onnx").write_bytes(make_model(0))
        write_digits(commands.folder, agents)
        settings = commands.settings(
            name=name,
            bind=f"tcp://{network.hub}:5555",
            model=model,
            hub=f"stop = {{ {stop} }}",
            more=f'[evaluation]\ndata = "held-out.npz"\nevery = "1 s"\n[checkpoint]\nevery = "1 hour"\n{more}',
        )
        keys = HubKeys.init(commands.folder / f"keys-{name}")
        self.hub, address = commands.hub(settings, "--keys", keys.folder, under=network.at(0))

        def token(number):
            return keys.issue_token(f"{name}-{number}", (address,), time.time()).text()

        self.began_s = time.monotonic()
        self.agents = [
            commands.agent(
                address, f"{name}-{number}", "--enrol", token(number),
                data=commands.folder / f"{number}.npz", step_s=step_s, under=network.at(number + 1),
            )
            for number in range(agents)
        ]  # fmt: skip

    def end(self):
        """Wait until the hub has finished; return the seconds that it took, from the start of the agents on."""
        assert self.hub.wait(LONGEST_S) == 0, self.hub
        took_s = time.monotonic() - self.began_s
        for agent in self.agents:
            with contextlib.suppress(ProcessLookupError):
                agent.signal(
                    signal.SIGTERM
                )  # one whose link is cut still looks for the hub; others end themselves
            assert agent.wait() in (0, -signal.SIGTERM), agent
        return took_s

    def check(self):
        """Hold the hub's journal against the agents' own counts: each update counts once. Return the updates.

        A push whose answer was cut off comes again, and the journal tells it as a duplicate.
        """
        told = self._commands.run("replay", f"run-{self._name}", "--json")
        assert (told.returncode, told.stderr) == (0, "")
        lines = [json.loads(line) for line in told.stdout.splitlines()]
        updates = [line for line in lines if line["event"] == "update" and line["outcome"] != "duplicate"]
        counted = [line for line in updates if line["outcome"] in ("applied", "buffered")]
        assert len(counted) == lines[-1]["updates_applied"] + lines[-1]["updates_buffered"]
        for number, agent in enumerate(self.agents):
            seqs = [line["seq"] for line in updates if line["device"] == f"{self._name}-{number}"]
            assert seqs == list(range(1, len(seqs) + 1))
            unheard = len(seqs) - agent.wait_for("stopped")["updates_answered"]
            assert unheard in (0, 1)  # at the end, the last answer may not have come through
        return updates


if repetitions("cuts of a link"):

    def test_updates_over_a_rough_link_that_is_cut_again_and_again_count_once_each(commands):
        """A short form of the next two: cuts of 4 s in every 10 s, a lease of 3 s, and one device far away."""
        cut = Link(ROUGH.bit_per_s, ROUGH.delay_s, ROUGH.loss, cut_for_s=4.0, cut_every_s=10.0)
        with network_of(ROUGH, cut, FAR) as network:
            often = "[liveness]\nheartbeat_s = 0.5\nlease_s = 3.0\n"
            training = Training(commands, network, 3, model=CNN, stop="", step_s=0.02, more=often)
            training.agents[1].wait_for("joined", count=1 + repetitions("cuts of a link"))
            training.agents[2].wait_for("joined")
            training.hub.signal(signal.SIGTERM)
            training.end()
            updates = training.check()
        assert "rejoined" in training.hub.names()
        assert {line["device"] for line in updates} >= {"hub-0", "hub-1"}


if repetitions("networks at full size"):

    def test_a_device_that_is_cut_a_third_of_the_time_does_not_hold_up_the_fleet(commands):
        cut = Link(ROUGH.bit_per_s, ROUGH.delay_s, ROUGH.loss, cut_for_s=20.0, cut_every_s=60.0)
        took_s = {}
        for name, links in {"undisturbed": [Link()] * 3, "rough": [ROUGH, ROUGH, cut]}.items():
            with network_of(*links) as network:
                training = Training(
                    commands,
                    network,
                    3,
                    model=CNN,
                    stop="accuracy = 0.95",
                    step_s=0.3,
                    name=name,
                    more=SLOW_LEARNING,
                )
                took_s[name] = training.end()
                training.check()
        assert took_s["rough"] <= 1.5 * took_s["undisturbed"]

    def test_a_model_of_5_mb_trains_over_250_kbit_per_s_and_600_ms(commands):
        with network_of(FAR, FAR) as network:
            training = Training(commands, network, 2, model=perceptron(1080), stop="updates = 4", step_s=0.5)
            training.end()
            assert len(training.check()) >= 4
        for process in (training.hub, *training.agents):
            assert not NEWS_OF_A_BREAK & set(process.names()), process
        assert training.hub.wait_for("stopped")["best"]["accuracy"] > 0.8

    def test_a_model_of_64_mb_arrives_once_over_3_mbit_per_s_that_is_cut_five_times_each_way(commands):
        """By default a model travels as float16, and an update as int8: 32 and 16 MB."""
        down_bytes, up_bytes = 32_000_000, 16_000_000
        cuts = [part * down_bytes // 6 for part in range(1, 6)]
        cuts += [down_bytes + part * up_bytes // 6 for part in range(1, 6)]
        slow = Link(bit_per_s=3e6, delay_s=0.03, cut_for_s=20.0, cut_at_bytes=tuple(cuts))
        with network_of(slow) as network:
            training = Training(commands, network, 1, model=perceptron(3970), stop="updates = 1", step_s=0.5)
            training.end()
            assert len(training.check()) == 1
            passed_down, passed_up = network.passed_bytes(1)
        (agent,) = training.agents
        assert agent.names().count("disconnected") >= len(cuts)
        assert down_bytes < passed_down < 1.15 * down_bytes
        assert up_bytes < passed_up < 1.15 * up_bytes
        assert training.hub.wait_for("stopped")["duplicates"] == 0
