"""Modules and trees on a GPU, for which a CPU stands: what is copied in an exchange, and that nothing is lost."""

import threading
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import edgeasync.jax
import edgeasync.torch
from edgeasync import Dataset, Hub, join
from edgeasync.jax import parameters, trees
from edgeasync.sdk import torch_copies
from edgeasync.sdk.lockstep import Lockstep
from edgeasync.sdk.torch_participant import TorchParticipant
from edgeasync.training.plan import LocalTraining
from edgeasync.training.trainer import take_local_steps
from tests.support.models.slow_link import SlowLink
from tests.support.parts.small_runs import in_full
from tests.support.programs.processes import PATIENCE_S

nn = torch.nn

STEPS = 16


@pytest.fixture
def links(monkeypatch):
    """The links to the GPU; every module that copies has one."""
    made = []

    def link_to(_):
        made.append(SlowLink())
        return made[-1]

    monkeypatch.setattr(torch_copies, "link_to", link_to)
    return made


class Counts(nn.Module):
    """Its parameters count the steps of an optimizer, and its buffer the batches."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))
        self.bias = nn.Parameter(torch.zeros(2))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        return x @ self.weight + self.bias

    def count(self):
        self.seen += 1
        return -(self.weight.sum() + self.bias.sum())


EXACT = {"push": "identity", "model": "identity", "delta": "off"}


def serve(model, run, overlap):
    """Return a hub that loses nothing of an update."""
    return Hub(model, run=run, bind="tcp://127.0.0.1:*", policy=policy(overlap), settings={"codec": EXACT})


def policy(overlap):
    return in_full(STEPS, overlap_steps_max=overlap)


def take_steps(module, session, exchanges):
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    steps = 0
    while session.exchanges < exchanges or steps % 7:
        optimizer.zero_grad()
        module.count().backward()
        optimizer.step()
        steps += 1
    return steps


@pytest.mark.parametrize("overlap", [0, 40])
def test_a_joined_module_is_copied_once_each_way_and_no_step_is_lost(overlap, links, tmp_path):
    module = Counts()
    with serve(edgeasync.torch.model(Counts()), tmp_path, overlap) as hub:
        session = join(hub.address, module, timeout_s=PATIENCE_S)
        (link,) = links
        assert (session.exchanges, link.copies) == (1, 1), "the first model"
        with session:
            steps = take_steps(module, session, 12)
            exchanges = session.exchanges
            assert 2 * exchanges - 1 <= link.copies <= 2 * exchanges
            assert link.bytes == link.copies * 4 * 9
        hub.wait_until_left(PATIENCE_S)
        assert hub.snapshot()["weight"].tolist() == np.full((3, 2), float(steps)).tolist()


def test_a_loop_that_runs_ahead_takes_steps_while_its_worker_is_busy(links, tmp_path, monkeypatch):
    """The worker codes no update before the loop has taken ten steps more."""
    module, waits = Counts(), threading.Semaphore(0)
    fill = Lockstep._fill

    def slow(self):
        fill(self)
        for _ in range(10):
            assert waits.acquire(timeout=PATIENCE_S)

    with serve(edgeasync.torch.model(Counts()), tmp_path, 40) as hub:
        with join(hub.address, module, timeout_s=PATIENCE_S) as session:
            monkeypatch.setattr(Lockstep, "_fill", slow)
            end = edgeasync.torch.watch_steps(lambda _: waits.release())
            steps = take_steps(module, session, 5)
            monkeypatch.setattr(Lockstep, "_fill", fill)
            end()
            for _ in range(20):
                waits.release()
        hub.wait_until_left(PATIENCE_S)
        assert hub.snapshot()["bias"].tolist() == [steps, steps]


def test_what_others_change_is_added_and_statistics_are_taken_over(links):
    """A worker that is scripted: an update, the hub's model, and a model that is not finite."""
    module = Counts()
    participant = TorchParticipant(module)
    spec = edgeasync.torch.model(Counts()).spec
    lockstep = Lockstep(spec, participant, ahead_max=8)
    vector = np.zeros(spec.length, np.float32)
    lockstep.begin(vector)
    lockstep._worker = "awaits_step"
    assert lockstep.take_model()

    def step():
        with torch.no_grad():
            module.weight += 1
            module.seen += 1
        assert lockstep.hand_over(edgeasync.StepResult(None, 1))

    def flush():
        thread = threading.Thread(target=lockstep.flush)
        thread.start()
        while thread.is_alive():
            lockstep.serve()

    step()
    step()
    assert (vector == 0).all(), "it is read at the end of an assignment"
    flush()
    assert spec.views(vector)["weight"].tolist() == [[2.0, 2.0]] * 3
    step()
    flush()
    assert spec.views(vector)["weight"].tolist() == [[2.0, 2.0]] * 3, "steps ahead are part of the next update"
    vector[:] = 10.0
    lockstep.begin(vector)
    step()
    assert lockstep.take_model()
    assert module.weight.tolist() == [[12.0, 12.0]] * 3
    assert module.bias.tolist() == [10.0, 10.0]
    assert module.seen.tolist() == [10.0]
    vector[:] = np.nan
    flush()
    assert spec.views(vector)["weight"].tolist() == [[12.0, 12.0]] * 3
    with torch.no_grad():
        module.weight.fill_(np.inf)
    step()
    lockstep._has_filled = False
    flush()
    vector[:] = 5.0
    lockstep.begin(vector)
    assert not lockstep.hand_over(edgeasync.StepResult(None, 1)), "its steps are dropped"
    lockstep._worker = "awaits_step"
    assert lockstep.take_model()
    assert module.weight.tolist() == [[5.0, 5.0]] * 3


@pytest.mark.parametrize("case", ["half", "state folder", "no overlap"])
def test_a_loop_stays_in_lockstep_that_rounds_or_resumes(case, tmp_path):
    module = Counts().half() if case == "half" else Counts()
    settings = {"state": tmp_path / "state"} if case == "state folder" else {}
    allowed = 0 if case == "no overlap" else 40
    with serve(edgeasync.torch.model(Counts()), tmp_path / "run", allowed) as hub:
        with join(hub.address, module, timeout_s=PATIENCE_S, **settings) as session:
            steps = take_steps(module, session, 4)
            assert not session._lockstep.model.runs_ahead
        hub.wait_until_left(PATIENCE_S)
        assert hub.snapshot()["bias"].tolist() == [steps, steps]


def data():
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    return Dataset.of(x, (x[:, 0] > 0).astype(np.int64))


def run(trainer, vector):
    trainer.begin(vector)
    return take_local_steps(
        trainer, 5, should_stop=lambda: False, on_step=lambda: None, wait=lambda _: None
    )  # fmt: skip


def test_a_trainer_on_a_gpu_copies_once_each_way_in_an_assignment(links):
    prepared = edgeasync.torch.model(nn.Linear(3, 2)).prepare(LocalTraining(batch_size=8))
    expected, found = prepared.initial.copy(), prepared.initial.copy()
    plain, trainer = (prepared.make_trainer(data(), 0, 1) for _ in range(2))
    trainer._held.shares_memory = False  # as elsewhere than on a CPU
    for round_ in range(1, 4):
        assert run(plain, expected).loss_mean == run(trainer, found).loss_mean
        np.testing.assert_array_equal(found, expected)
        assert links[0].copies == 2 * round_
    assert not (found == prepared.initial).any()


@pytest.fixture
def on_gpu(monkeypatch):
    """JAX's transfers, as on a GPU."""
    transfers = []
    put, gathered = jax.device_put, trees._gathered
    for module in (trees, edgeasync.jax.models):
        monkeypatch.setattr(module, "gpu_of", lambda _: jax.devices()[0])
    monkeypatch.setattr(trees.jax, "device_put", lambda *given: transfers.append("in") or put(*given))

    def counted(*given):
        transfers.append("out")
        return gathered(*given)

    counted.__wrapped__ = gathered
    monkeypatch.setattr(trees, "_gathered", counted)
    return transfers


def tree():
    return {"weight": jax.numpy.arange(6.0).reshape(3, 2), "bias": jax.numpy.zeros(2), "scale": jax.numpy.ones(())}


def test_a_tree_on_a_gpu_is_copied_once_each_way(on_gpu):
    spec = edgeasync.ParameterSpec(tuple(trees.parameters_of(tree())))
    vector = np.empty(spec.length, np.float32)
    trees.read_tree(tree(), spec.views(vector))
    for name, array in spec.views(vector).items():
        np.testing.assert_array_equal(array, tree()[name])
    found = trees.tree_like(tree(), spec.views(vector + 1))
    for name, array in tree().items():
        np.testing.assert_array_equal(found[name], array + 1)
    assert on_gpu == ["out", "in"]


@pytest.mark.parametrize(("piece", "pieces"), [(9, 1), (4, 3), (1, 9), (0, 5)])
def test_a_tree_travels_in_pieces(piece, pieces, on_gpu, monkeypatch):
    """A piece ends inside an array or at its end, or holds several arrays. An empty array is in no piece."""
    monkeypatch.setattr(trees, "PIECE", piece)
    monkeypatch.setattr(trees, "PIECES_MAX", 5 if piece == 0 else 9)
    ours = tree() | {"empty": jax.numpy.zeros((0, 2)), "bias": jax.numpy.full(2, 7.0)}
    model = parameters.params(ours)
    spec = edgeasync.ParameterSpec(tuple(model.parameters))
    vector = np.full(spec.length, np.nan, np.float32)
    model.read(spec.views(vector))
    for name, array in spec.views(vector).items():
        np.testing.assert_array_equal(array, ours[name])
    model.stage(spec.views(vector + 1))
    model.add(spec.views(vector + 1))
    for name, array in ours.items():
        np.testing.assert_array_equal(model.value[name], 2 * array + 1)
    assert on_gpu == ["out"] + ["in"] * pieces
    model.write(spec.views(vector))
    for name, array in ours.items():
        np.testing.assert_array_equal(model.value[name], array)


@pytest.mark.parametrize("shape", [(6,), (3, 2)])
def test_a_tree_on_a_gpu_may_be_donated_once_its_read_has_begun(shape, on_gpu):
    donating = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    model = parameters.params({"w": jax.numpy.arange(6.0).reshape(shape)})
    arrays = {"w": np.empty(shape, np.float32)}
    fill = model.begin_read(arrays)
    model.value = donating(model.value)
    fill()
    np.testing.assert_array_equal(arrays["w"].ravel(), np.arange(6.0))
    model.stage({"w": np.ones(shape, np.float32)})
    model.value = donating(model.value)
    model.add(arrays)
    np.testing.assert_array_equal(np.ravel(model.value["w"]), np.arange(6.0) + 3)


@pytest.mark.parametrize("device", [None, jax.devices()[0]])
def test_a_loop_of_jax_only_launches_what_an_exchange_needs(device, on_gpu, monkeypatch):
    """It copies nothing between host and GPU, and compiles nothing after the first exchange."""
    monkeypatch.setattr(trees, "PIECE", 4)
    copied, put, gathered = [], trees.jax.device_put, trees._gathered.__wrapped__
    counting = types.SimpleNamespace(**vars(np))
    counting.asarray = lambda array: copied.append("out") or np.asarray(array)
    monkeypatch.setattr(trees, "np", counting)
    monkeypatch.setattr(trees.jax, "device_put", lambda *given: copied.append("in") or put(*given))
    model = parameters.params(jax.device_put(tree(), device))
    on_gpu.clear()
    copied.clear()
    spec = edgeasync.ParameterSpec(tuple(model.parameters))
    vector = np.zeros(spec.length, np.float32)
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree))
    compiled = []
    for _ in range(3):
        model.value = step(model.value)
        fill = model.begin_read(spec.views(vector))
        assert copied == []
        fill()
        model.stage(spec.views(vector))
        assert copied == ["out"] * 3 + ["in"] * 3
        copied.clear()
        model.add(spec.views(vector))
        assert copied == []
        model.value = step(model.value)
        compiled.append([each._cache_size() for each in (gathered, trees._added, step)])
    assert compiled[0] == compiled[-1]
    model.write(spec.views(vector))
    model.value = step(model.value)
    assert step._cache_size() == compiled[-1][-1]


def test_a_jax_trainer_on_a_gpu_copies_once_each_way_in_an_assignment(on_gpu, monkeypatch):
    def loss(params, x, y):
        return jax.numpy.mean((x @ params["weight"] + params["bias"]) ** 2) * params["scale"]

    prepared = edgeasync.jax.model(tree(), loss).prepare(LocalTraining(batch_size=8))
    vector = prepared.initial.copy()
    trainer = prepared.make_trainer(data(), 0, 1)
    on_gpu.clear()
    run(trainer, vector)
    run(trainer, vector)
    assert on_gpu == ["in", "out"] * 2
    found = vector.copy()
    monkeypatch.undo()
    vector = prepared.initial.copy()
    plain = prepared.make_trainer(data(), 0, 1)
    for _ in range(2):
        run(plain, vector)
    np.testing.assert_allclose(found, vector, rtol=1e-6)


def test_a_tree_of_a_loop_that_runs_ahead_keeps_its_steps(tmp_path):
    model = parameters.params({"w": jax.numpy.zeros(3)})
    with serve({"w": np.zeros(3)}, tmp_path, 40) as hub:
        with join(hub.address, model, timeout_s=PATIENCE_S) as session:
            steps = 0
            while session.exchanges < 8:
                model.value = {"w": model.value["w"] + 1}
                session.step()
                steps += 1
            assert session._lockstep.model.runs_ahead
        hub.wait_until_left(PATIENCE_S)
        assert hub.snapshot()["w"].tolist() == [steps] * 3
