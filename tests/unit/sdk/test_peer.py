"""What a `Peer` takes, and what of it an `Agent` refuses."""

import numpy as np
import pytest

from edgeasync import SGD, Agent, Peer
from edgeasync.errors import ConfigError, EdgeAsyncError
from edgeasync.runtime.agent_settings import AgentSection
from edgeasync.runtime.peer_settings import PeerSection
from edgeasync.training.numpy_models import SoftmaxModel
from tests.support.programs.peers import FILE, Still, name_of, write_list

DATA = np.eye(4), np.arange(4) % 2
MODEL = SoftmaxModel(inputs=4, classes=2)

OF_A_PEER = {
    "topology": "ring", "peers": FILE, "address": "tcp://10.0.0.1:5600",
    "bind": "tcp://127.0.0.1:*", "round_every_s": 1.0, "round_steps": 5,
    "codec": "float16", "lease_s": 1.0, "steps_max": 9, "rounds_max": 3, "frozen": "warn", "out": "trained.onnx",
    "output": "scores", "train": "head.*", "freeze": "head.*",
}  # fmt: skip


@pytest.mark.parametrize("name", OF_A_PEER)
def test_an_agent_refuses_what_a_peer_has_and_names_it(name):
    with pytest.raises(ConfigError, match=f"Agent: unknown key `{name}`; .*a peer; use edgeasync.Peer"):
        Agent("tcp://127.0.0.1:9", DATA, **{name: OF_A_PEER[name]})


def test_every_key_of_a_peers_own_is_refused():
    own = {*PeerSection.__struct_fields__} - {*AgentSection.__struct_fields__}
    assert own - {"epochs"} == {*OF_A_PEER} - {"output", "train", "freeze"}  # an agent has other `epochs`


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"link_share": 0.2}, "unknown key `link_share`"),
        ({"peers": None, "hub": "tcp://127.0.0.1:9"}, "hub= and address=, the address at which the other peers"),
        ({"round_step": 3}, "did you mean round_steps"),
        ({"device_id": "a"}, "device_id is a key of a settings file; pass name instead"),
        ({"out": "a.onnx"}, "save `arrays`"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"peers": None}, "Peer needs the list of peers: pass peers="),
        ({"state": None}, "state is None; pass the path of a folder"),
        ({"loss": "l3"}, "loss"),
    ],
)
def test_mistakes(tmp_path, arguments, said):
    with pytest.raises(ConfigError, match=said):
        Peer(**{"peers": FILE, "data": DATA, "model": MODEL, "state": tmp_path} | arguments)


def test_passes_need_data(tmp_path):
    with pytest.raises(ConfigError, match="set steps_max"):
        Peer(Still(), {"weight": np.zeros((40, 25))}, peers=FILE, state=tmp_path, epochs=1)


def test_one_that_has_not_begun_has_no_model(tmp_path):
    peer = Peer(DATA, MODEL, peers=FILE, state=tmp_path)
    assert (peer.connected, peer.rounds) == (False, 0)
    for ask in (lambda: peer.arrays, lambda: peer.evaluate(DATA)):
        with pytest.raises(EdgeAsyncError, match="has not started"):
            ask()


def test_passes_over_fewer_examples_than_a_batch_are_taken(tmp_path):
    """Red before: a step takes all 4 examples, so 20 passes are 20 steps; it took 3, as if a batch had 32."""
    write_list(tmp_path, [0, 1])
    reports = []
    how = {"name": name_of(0), "state": tmp_path / name_of(0), "lease_s": 0.1}
    with Peer(DATA, MODEL, peers=tmp_path / FILE, optimizer=SGD(learning_rate=0.1), epochs=20, **how,
              on_report=reports.append) as peer:  # fmt: skip
        peer.wait()
        assert peer.evaluate(DATA).version == 20
        assert peer.evaluate(lambda arrays: float(sum(map(np.size, arrays.values())))).loss == 10.0
    assert [report.event for report in reports if report.event == "alone"]


@pytest.mark.parametrize("trainer", [False, True])
def test_a_second_start_resumes_its_model(tmp_path, trainer):
    write_list(tmp_path, [0, 1])
    data, model = (Still(), {"weight": np.zeros((40, 25)), "bias": np.zeros(25)}) if trainer else (DATA, MODEL)
    for steps in (3, 5):
        how = {"name": name_of(0), "state": tmp_path / name_of(0), "lease_s": 0.1}
        with Peer(data, model, peers=tmp_path / FILE, steps_max=steps, **how) as peer:
            peer.wait()
            assert peer.evaluate(lambda _: 0.0).version == steps
