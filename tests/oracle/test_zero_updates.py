"""Steps that change nothing make updates of exactly zero, in every type, codec, optimizer and topology."""

import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import edgeasync.torch
from edgeasync import Hub, join
from edgeasync.sdk.lockstep import Lockstep
from edgeasync.sdk.torch_participant import TorchParticipant
from edgeasync.training.trainer import StepResult
from tests.support.parts.small_runs import plain
from tests.support.programs.peers import FILE, name_of, write_list
from tests.support.programs.processes import PATIENCE_S

POLICY = plain(3)
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
CODECS = {
    "identity": {"push": "identity", "model": "identity", "delta": "off"},
    "float16": {"push": "float16", "model": "float16"},
    "bfloat16": {"push": "bfloat16", "model": "bfloat16"},
    "int8": {"push": "int8"},
    "top-k": {"push": "top_k(0.1)+int8"},
    "default": {},
}
# torch's usual eps is 0 in float16, where Adam then divides 0 by 0
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.0, momentum=0.9, weight_decay=0.1),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.0, eps=1e-3),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.0, eps=1e-3),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.0, eps=1e-3),
}

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def make(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    module.register_buffer("scale", torch.rand(3))
    return module.to(dtype)


def take_steps(module, optimizer, session, exchanges):
    dtype = module[0].weight.dtype
    while session.exchanges < exchanges and not session.finished:
        optimizer.zero_grad()
        module(torch.randn(4, 16).to(dtype)).sum().backward()
        optimizer.step()


def moved_by(module, optimizer, codec):
    """Return by how much a hub's model has moved after some exchanges."""
    hub = Hub(
        edgeasync.torch.model(make(seed=1)), run=tempfile.mkdtemp(), bind="tcp://127.0.0.1:*",
        policy=POLICY, settings={"codec": codec},
    )  # fmt: skip
    with hub:
        before = {name: array.copy() for name, array in hub.snapshot().items()}
        with join(hub.address, module, optimizer, timeout_s=PATIENCE_S) as session:
            take_steps(module, optimizer, session, 6)
        after = hub.snapshot()
        assert hub.status()["updates_applied"] >= 5
    return max(float(np.abs(after[name] - array).max()) for name, array in before.items())


@dtypes
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_hub_stays_where_it_is(dtype, codec, make_optimizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    module = make(dtype)
    assert moved_by(module, make_optimizer(module.parameters()), codec) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_so_it_does_for_a_module_that_is_made_shorter_after_join(dtype):
    module = torch.nn.Linear(16, 8)
    held = TorchParticipant(module)
    lockstep = Lockstep(edgeasync.torch.model(torch.nn.Linear(16, 8)).spec, held)
    for _ in range(2):
        vector = np.random.default_rng(0).normal(size=lockstep.spec.length).astype(np.float32)
        begun = vector.copy()
        lockstep.begin(vector)
        lockstep._worker = "awaits_step"  # as the agent's worker has it
        assert lockstep.take_model()
        lockstep.hand_over(None)
        assert (vector == begun).all()
        module.to(dtype)


@dtypes
@pytest.mark.parametrize("topology", ["ring", "all_to_all"])
def test_peers_stay_where_they_are(dtype, topology, tmp_path):
    """All begin with the same values, which every type has; the means of equal models are these models."""
    write_list(tmp_path, range(2))
    modules = [make(dtype) for _ in range(2)]  # here: torch's seed is of all threads

    def live(number):
        module = modules[number]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        begun = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        with join(
            model=module, optimizer=optimizer, topology=topology, peers=tmp_path / FILE, name=name_of(number),
            state=tmp_path / name_of(number), lease_s=5.0, round_steps=3,
        ) as session:  # fmt: skip
            take_steps(module, optimizer, session, 3)
        return all(torch.equal(tensor, begun[name]) for name, tensor in module.state_dict().items())

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(live, range(2))] == [True, True]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_arrays_of_numpy_make_no_update_either(dtype, tmp_path):
    values = np.random.default_rng(0).normal(size=50)
    with Hub({"w": values}, run=tmp_path, bind="tcp://127.0.0.1:*", policy=POLICY) as hub:
        before, model = hub.snapshot()["w"].copy(), {"w": np.zeros(50, dtype)}
        with join(hub.address, model, timeout_s=PATIENCE_S) as session:
            while session.exchanges < 6:
                session.step()
        assert (hub.snapshot()["w"] == before).all()


@dtypes
@pytest.mark.parametrize("each_step", [True, False])
def test_of_a_change_the_update_has_what_the_module_holds_of_it(each_step, dtype):
    """Half of the digits may be lost in the module, but what it gained is what travels."""
    module, other = make(dtype), TorchParticipant(make(seed=1))
    held = TorchParticipant(module)
    lockstep = Lockstep(edgeasync.torch.model(make()).spec, held, each_step=each_step)
    vector = np.empty(lockstep.spec.length, np.float32)
    other.read(lockstep.spec.views(vector))
    begun = vector.copy()
    lockstep.begin(vector)
    lockstep._worker = "awaits_step"  # as the agent's worker has it
    assert lockstep.take_model()
    before = {name: tensor.float().clone() for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        module[2].bias += 0.25
    lockstep.hand_over(StepResult(None, 0))
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(lockstep.flush)
        while not worker.done():
            lockstep.serve()
    delta = lockstep.spec.views(vector - begun)
    gained = module.state_dict()["2.bias"].float() - before["2.bias"]
    np.testing.assert_allclose(delta["2.bias"], gained.numpy(), atol=1e-6)
    assert all((array == 0).all() for name, array in delta.items() if name != "2.bias")
