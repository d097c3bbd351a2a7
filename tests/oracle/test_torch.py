"""torch modules on a fleet: a tutorial's loop that joins, and modules that `train` and agents train."""

import dataclasses
import difflib
import doctest
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import edgeasync
import edgeasync.torch
from edgeasync import Hub, Stop, join, train
from edgeasync.callbacks import ExchangeEvent
from edgeasync.errors import ConfigError, DataError
from edgeasync.net.status import fetch_status
from edgeasync.sdk.torch_participant import TorchParticipant
from edgeasync.sdk.torch_trainer import _stream
from edgeasync.training.plan import LocalTraining
from tests.support.programs.killed_loops import kill_and_come_back
from tests.support.programs.processes import PATIENCE_S

ROOT = Path(__file__).parents[2]
LOOP = ROOT / "examples/torch_loop.py"
JOINED = ROOT / "examples/torch_joined.py"
nn = torch.nn


def module():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def data(count=64, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return x, (x[:, 0] > x[:, 1]).astype(np.int64)


def test_a_module_is_trained_and_given_back_as_one():
    x, y = data(512)
    given = module()
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    model = edgeasync.torch.model(given, optimizer=torch.optim.AdamW(given.parameters(), lr=0.01))
    run = train(model, (x, y), workers=2, evaluate=data(256, 1), until=Stop(epochs=12))
    assert run.accuracy > 0.9
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.state_dict().items())
    trained = run.model.eval()
    found = trained(torch.from_numpy(data(256, 1)[0])).argmax(1).numpy()
    assert (found == data(256, 1)[1]).mean() == pytest.approx(run.accuracy)
    assert not torch.equal(trained[1].running_mean, before["1.running_mean"]), "statistics take part"
    assert edgeasync.torch.load(module(), run)[0].weight.detach().numpy() == pytest.approx(run.arrays["0.weight"])


class Places(nn.Module):
    """The scores of two classes at each of five places: of place p class 1 if its first number is over 0."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(4, 2)
        with torch.no_grad():
            self.scores.weight.copy_(torch.eye(2, 4).flip(0))
            self.scores.bias.zero_()

    def forward(self, x):
        return self.scores(x * torch.tensor([1.0, 0.0, 0.0, 0.0])).movedim(2, 1)


def test_an_accuracy_of_several_places_is_a_share_of_them_and_an_ignored_label_does_not_count():
    x = np.random.default_rng(0).normal(size=(300, 5, 4)).astype(np.float32)
    y = (x[..., 0] > 0).astype(np.int64)
    y[:, 0] ^= 1  # one place in five is wrong
    prepared = edgeasync.torch.model(Places()).prepare(LocalTraining())
    found = prepared.make_evaluator(edgeasync.Dataset.of(x, y))(prepared.initial)
    assert found.accuracy == pytest.approx(0.8)
    wanted = nn.functional.cross_entropy(Places()(torch.from_numpy(x)), torch.from_numpy(y))
    assert found.loss == pytest.approx(wanted.item(), rel=1e-5)
    y[:, 0] = 9
    loss = nn.CrossEntropyLoss(ignore_index=9)
    prepared = edgeasync.torch.model(Places(), loss).prepare(LocalTraining(metrics=("accuracy",)))
    data = edgeasync.Dataset.of(x, y)
    found = prepared.make_evaluator(data)(prepared.initial)
    assert found.accuracy == 1.0
    wanted = loss(Places()(torch.from_numpy(x)), torch.from_numpy(y))
    assert found.loss == pytest.approx(wanted.item(), rel=1e-5)
    trainer = prepared.make_trainer(data, 0, 1)
    trainer.begin(prepared.initial.copy())
    trainer.step()
    assert trainer.metrics() == {"accuracy": 1.0}
    alone = prepared.make_evaluator(edgeasync.Dataset.of(x, np.full_like(y, 9)))
    with pytest.raises(DataError, match="all labels are the ignored label, so the loss is undefined"):
        alone(prepared.initial)


class Halved(nn.Linear):
    """A layer whose scores are bfloat16, as under autocast."""

    def forward(self, x):
        with torch.autocast("cpu"):
            return super().forward(x)


def test_scores_in_bfloat16_are_measured_like_any():
    x, y = data(16)
    prepared = edgeasync.torch.model(Halved(4, 2)).prepare(LocalTraining(metrics=("accuracy",)))
    trainer = prepared.make_trainer(edgeasync.Dataset.of(x, y), 0, 1)
    trainer.begin(prepared.initial.copy())
    trainer.step()
    assert 0.0 <= trainer.metrics()["accuracy"] <= 1.0
    assert prepared.make_evaluator(edgeasync.Dataset.of(x, y))(prepared.initial).accuracy is not None


def test_scores_that_are_not_of_the_labels_have_no_accuracy():
    data = edgeasync.Dataset.of(np.zeros((4, 5, 4)), np.zeros((4, 5), int))
    swapped = edgeasync.torch.model(nn.Linear(4, 2), lambda found, y: nn.functional.cross_entropy(found.mT, y))
    prepared = swapped.prepare(LocalTraining())
    assert prepared.make_evaluator(data)(prepared.initial).accuracy is None


ELEMENTWISE = [None, nn.MSELoss(), nn.functional.l1_loss, nn.BCEWithLogitsLoss()]


@pytest.mark.parametrize("loss", ELEMENTWISE)
def test_one_value_of_each_example_may_be_in_a_row_or_in_a_column(loss):
    x, y = data(32)
    trained, found = [], []
    for targets in (y, y[:, None]):
        kind = float if loss in (None, nn.functional.l1_loss) else int  # whole values are values
        given = edgeasync.Dataset.of(x, targets.astype(kind))
        torch.manual_seed(0)
        prepared = edgeasync.torch.model(nn.Linear(4, 1), loss).prepare(LocalTraining())
        trainer = prepared.make_trainer(given, 0, 1)
        trainer.begin(vector := prepared.initial.copy())
        for _ in range(5):
            trainer.step()
        trained.append(vector)
        found.append(prepared.make_evaluator(given)(vector))
    np.testing.assert_array_equal(*trained)
    assert found[0] == found[1]
    assert found[0].accuracy is None


@pytest.mark.parametrize("loss", ELEMENTWISE)
def test_targets_of_another_shape_are_told(loss):
    prepared = edgeasync.torch.model(nn.Linear(4, 3), loss).prepare(LocalTraining())
    given = edgeasync.Dataset.of(np.zeros((8, 4)), np.zeros(8))
    trainer = prepared.make_trainer(given, 0, 1)
    trainer.begin(prepared.initial.copy())
    with pytest.raises(DataError, match=r"returns shape \(8, 3\) for targets of shape \(8,\)"):
        trainer.step()
    with pytest.raises(DataError, match=r"returns shape \(8, 3\)"):
        prepared.make_evaluator(given)(prepared.initial)
    turned = edgeasync.Dataset.of(np.zeros((8, 2, 4)), np.zeros((8, 3, 2)))
    with pytest.raises(DataError, match=r"returns shape \(8, 2, 3\) for targets of shape \(8, 3, 2\)"):
        prepared.make_evaluator(turned)(prepared.initial)


@pytest.mark.parametrize("name", edgeasync.torch.__all__)
def test_an_example_works(name):
    test = doctest.DocTestFinder().find(getattr(edgeasync.torch, name), name)[0]
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def changed(module):
    """Return an optimizer whose options are others than it was made with."""
    optimizer = torch.optim.SGD(module.parameters(), lr=9.0, momentum=0.2)
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.01)
    optimizer.param_groups[0]["momentum"] = 0.7
    return optimizer


def grouped(module):
    """Return an optimizer with groups that are not in the module's order."""
    groups = [{"params": module[3].parameters(), "lr": 0.5}, {"params": module[1].parameters(), "momentum": 0.0}]
    return torch.optim.SGD([*groups, {"params": module[0].parameters()}], lr=0.01, momentum=0.9, nesterov=False)


@pytest.mark.parametrize(
    "make",
    [lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), changed, grouped],
    ids=["plain", "changed", "grouped"],
)
def test_one_update_is_what_torch_alone_does(make):
    x, y = data(32)
    alone = module().train()
    optimizer = make(alone)
    given = module()
    prepared = edgeasync.torch.model(given, optimizer=make(given)).prepare(LocalTraining(batch_size=32))
    trainer = prepared.make_trainer(edgeasync.Dataset.of(x, y), 0, 1)
    vector = prepared.initial.copy()
    trainer.begin(vector)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(alone(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
        trainer.step()
    for name, array in prepared.spec.views(vector).items():
        np.testing.assert_allclose(array, alone.state_dict()[name].numpy(), atol=1e-5)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(4, 2)

    def forward(self, image, age):
        return self.scores(image + age)


def test_a_module_of_several_inputs_takes_them_by_the_names_of_the_data():
    x = np.eye(4, dtype=np.float32)
    two = edgeasync.Dataset.of({"age": x[:, :1], "image": x}, [0, 1, 0, 1])
    module = TwoInputs()
    with torch.no_grad():
        found = module(torch.from_numpy(x), torch.from_numpy(x[:, :1]))
        wanted = nn.functional.cross_entropy(found, torch.tensor([0, 1, 0, 1])).item()
    prepared = edgeasync.torch.model(module).prepare(LocalTraining())
    assert prepared.make_evaluator(two)(prepared.initial).loss == pytest.approx(wanted)
    trainer = prepared.make_trainer(two, 0, 1)
    trainer.begin(prepared.initial.copy())
    assert trainer.step().loss == pytest.approx(wanted)
    prepared = edgeasync.torch.model(nn.Linear(4, 2)).prepare(LocalTraining())
    for use in (lambda: prepared.make_trainer(two, 0, 1), lambda: prepared.make_evaluator(two)):
        with pytest.raises(
            DataError, match=r"has the inputs age, image, but Linear.forward has input; use the same"
        ):
            use()


@dataclasses.dataclass
class Heads:
    scores: torch.Tensor
    box: torch.Tensor


STRUCTURES = {
    "dict": (lambda scores: {"scores": scores, "box": scores}, lambda found: found["scores"]),
    "tuple": (lambda scores: (scores, scores), lambda found: found[0]),
    "dataclass": (lambda scores: Heads(scores, scores), lambda found: found.scores),
    "one score": (lambda scores: scores[:, :1], lambda found: torch.cat([found, -found], 1)),
    "turned": (lambda scores: scores.T, lambda found: found.T),
}


@pytest.mark.parametrize(("returned", "read"), STRUCTURES.values(), ids=STRUCTURES)
def test_what_a_loss_of_ones_own_reads_is_evaluated_by_the_loss_alone(returned, read, caplog):
    class Structured(nn.Linear):
        def forward(self, x):
            return returned(super().forward(x))

    def loss(found, y):
        return nn.functional.cross_entropy(read(found), y)

    x, y = data(48)
    run = train(
        edgeasync.torch.model(Structured(4, 2), loss),
        (x, y),
        evaluate=(x, y),
        metrics=["f1"],
        workers=1,
        until=Stop(updates=2),
    )
    assert run.accuracy is None
    wanted = loss(run.model(torch.from_numpy(x)), torch.from_numpy(y)).item()
    assert run.loss == pytest.approx(wanted, rel=1e-5)
    assert caplog.text.count("the output is not one tensor of scores") == 1


def test_a_loss_of_torch_says_that_it_takes_one_tensor():
    class Structured(nn.Linear):
        def forward(self, x):
            return {"scores": super().forward(x)}

    for loss in (None, nn.CrossEntropyLoss(), nn.MSELoss()):
        given = edgeasync.torch.model(Structured(4, 2), loss)
        with pytest.raises(
            ConfigError,
            match=r"returns a dict, but the loss expects one tensor; pass your own loss to edgeasync.torch",
        ):
            train(given, data(16), workers=1, until=Stop(updates=1))


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (lambda: edgeasync.torch.model(3), "module is int; pass a torch.nn.Module"),
        (lambda: edgeasync.torch.model(nn.ReLU()), "ReLU has no trainable parameters"),
        (
            lambda: edgeasync.torch.model(module(), optimizer=0.1),
            "optimizer is float; pass a torch.optim optimizer",
        ),
        (lambda: join("tcp://127.0.0.1:9", module(), 0.1), "optimizer is float; pass a torch.optim optimizer"),
    ],
)
def test_mistakes_are_told_in_one_line(mistake, told):
    with pytest.raises(ConfigError, match=told):
        mistake()


def test_an_optimizer_is_of_what_the_module_trains():
    given = module()
    with pytest.raises(ConfigError, match="optimizer has a parameter that Sequential lacks; create it"):
        edgeasync.torch.model(given, optimizer=torch.optim.SGD(module().parameters()))
    head = torch.optim.SGD(given[3].parameters(), lr=0.5)
    with pytest.raises(ConfigError, match=r"does not train '0.weight'; add it to the optimizer"):
        edgeasync.torch.model(given, optimizer=head)
    given[:3].requires_grad_(False)
    for optimizer in (
        head,
        torch.optim.SGD([{"params": given[0].parameters()}, {"params": given[3].parameters()}]),
    ):
        run = train(edgeasync.torch.model(given, optimizer=optimizer), data(), until=Stop(updates=2), workers=1)
        assert "0.weight" not in run.arrays
        assert not torch.equal(run.model[3].weight, given[3].weight)


def test_no_batch_of_a_batch_norm_is_one_example_alone():
    x, y = data(33)
    prepared = edgeasync.torch.model(module()).prepare(LocalTraining(batch_size=8))
    trainer, again = (prepared.make_trainer(edgeasync.Dataset.of(x, y), 0, 1) for _ in range(2))
    trainer.begin(prepared.initial.copy())
    found = []
    for _ in range(10):
        found.append(trainer.step().examples)
        again.restore(trainer.state())
    assert found == [8, 8, 8, 7, 2] * 2
    again.begin(prepared.initial.copy())
    assert again.step().examples == 8


def test_an_epoch_sees_every_example_once_though_none_is_alone():
    stream = _stream(edgeasync.Dataset.of(*data(33)), 8, 0, norms=True)
    for _ in range(3):
        assert sorted(number for _ in range(5) for number in stream.draw()) == list(range(33))


@pytest.mark.parametrize(("count", "batch_size"), [(1, 8), (8, 1), (3, 2)])
def test_a_batch_norm_that_cannot_have_two_examples_says_so(count, batch_size):
    prepared = edgeasync.torch.model(module()).prepare(LocalTraining(batch_size=batch_size))
    trainer = prepared.make_trainer(edgeasync.Dataset.of(*data(count)), 0, 1)
    trainer.begin(prepared.initial.copy())
    with pytest.raises(DataError, match="a batch norm cannot train on a batch of one example; use more data"):
        [trainer.step() for _ in range(2)]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"optimizer": edgeasync.Adam()},
            "optimizer does not apply to TorchModel models: pass one of torch.optim to edge",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(given, told, tmp_path):
    model = edgeasync.torch.model(module())
    with pytest.raises(ConfigError, match=told):
        train(model, data(), until=Stop(updates=1), **given)
    with pytest.raises(ConfigError, match=told):
        train(model, data(), workers=2, topology="ring", until=Stop(updates=1), **given)
    with pytest.raises(ConfigError, match=told):
        Hub(model, run=tmp_path, bind="tcp://127.0.0.1:*", **given).start()
    if "accumulation_steps" not in given:
        with pytest.raises(ConfigError, match=told):
            edgeasync.Agent("tcp://127.0.0.1:9", data(), model=model, **given)


def test_what_a_hub_says_for_other_devices_refuses_no_module(tmp_path):
    layers = edgeasync.nn.Linear(4, 2)
    given = {
        "accumulation_steps": 2,
        "micro_batch_size": 8,
        "optimizer": edgeasync.Adam(),
        "metrics": ["accuracy"],
    }
    hub = Hub(layers, input_shape=(4,), run=tmp_path, bind="tcp://127.0.0.1:*", until=Stop(updates=2), **given)
    told = []
    own = {"model": edgeasync.torch.model(Named()), "epochs": 1, "batch_size": 16}
    with hub, edgeasync.Agent(hub.address, data(), callbacks=[told.append], **own) as agent:
        agent.wait(PATIENCE_S)
    assert edgeasync.Run.open(hub.path).updates >= 2
    exchanges = [event for event in told if isinstance(event, ExchangeEvent)]
    assert {(event.local_steps, event.examples) for event in exchanges} == {(4, 64)}


class Named(nn.Module):
    """A layer with the names that edgeasync.nn has."""

    def __init__(self):
        super().__init__()
        self.add_module("0", nn.Linear(4, 2))

    def forward(self, x):
        return self.get_submodule("0")(x)


def test_any_optimizer_of_the_modules_parameters_is_watched(tmp_path):
    joined, other = module(), module()
    hub = Hub(edgeasync.torch.model(module()), run=tmp_path, bind="tcp://127.0.0.1:*")
    with hub, join(hub.address, joined, timeout_s=PATIENCE_S) as session:
        for trained in (joined, other):
            optimizer = torch.optim.Adam(trained.parameters())
            trained(torch.zeros(2, 4)).sum().backward()
            optimizer.step()
        assert session.steps == 1
        joined.eval()
    torch.optim.Adam(joined.parameters()).step()
    assert session.steps == 1, "nobody watches any more"


class Tied(nn.Module):
    """Weights that are tied, frozen, in half precision, and buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.fine = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def test_of_a_module_what_is_trained_takes_part_once_and_floating_buffers_as_statistics():
    held = TorchParticipant(given := Tied())
    assert [(each.name, each.role) for each in held.parameters] == [
        ("fine", "trained"),
        ("embed.weight", "trained"),
        ("mean", "statistic"),
    ]
    arrays = {each.name: np.full(each.shape, 0.5, np.float32) for each in held.parameters}
    frozen = given.frozen.weight.clone()
    held.write(arrays)
    assert given.out.weight is given.embed.weight
    assert given.fine.dtype == torch.bfloat16
    assert (given.out.weight.eq(0.5).all(), given.fine.eq(0.5).all(), given.mean.eq(0.5).all()) == (True,) * 3
    assert (torch.equal(given.frozen.weight, frozen), int(given.seen)) == (True, 0)
    read = {name: np.zeros_like(array) for name, array in arrays.items()}
    held.read(read)
    assert all((read[name] == 0.5).all() for name in read)


def test_two_processes_train_a_module(tmp_path):
    x, y = data(256)
    run = train(edgeasync.torch.model(module()), (x, y), workers=2, engine="processes", until=Stop(updates=20))
    assert isinstance(run.model, nn.Sequential)
    assert run.updates >= 20


def test_the_loop_of_a_tutorial_joins_by_three_lines():
    before, after = (
        [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][1:]
        for path in (LOOP, JOINED)
    )
    changed = [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    arguments = {"import sys", "address, name, state = sys.argv[1:]"}  # of this example, not of joining
    told = {line for line in changed if line.startswith("print(")}
    assert sorted(set(changed) - arguments - told) == [
        "for inputs, targets in session.batches(loader):",
        "import edgeasync",
        "with edgeasync.join(address, module, optimizer, name=name, state=state, also=[schedule]) as session:",
    ]


def test_a_joined_loop_that_is_killed_resumes_and_every_step_counts(tmp_path):
    last, counted = kill_and_come_back(JOINED, joined_module(), tmp_path)
    epoch, step, accuracy = (float(word) for word in re.findall(r"[0-9.]+", last))
    assert (epoch, step) == (9, 440), "10 passes over 44 batches, as if nobody had been killed"
    assert counted == 440
    assert accuracy > 0.9


def test_the_hub_of_the_examples_is_one_for_the_joined_loop(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "examples/torch_hub.py"),
        "tcp://127.0.0.1:*",
        "torch",
        str(tmp_path / "run"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hub:
        try:
            address = hub.stdout.readline().strip()
            run = [sys.executable, str(JOINED), address, "mine", str(tmp_path / "device")]
            found = subprocess.run(run, capture_output=True, text=True, check=True)
            assert fetch_status(address)["updates_applied"] > 0
        finally:
            hub.send_signal(signal.SIGINT)
    assert hub.returncode == 0
    assert "epoch 9" in found.stdout.splitlines()[-1]


def joined_module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def test_labels_of_one_column_have_an_accuracy_beside_a_loss_that_takes_them():
    x, y = data(33)
    given = edgeasync.torch.model(
        nn.Sequential(nn.Linear(x.shape[1], 3)), lambda found, y: nn.functional.cross_entropy(found, y.squeeze(1))
    )
    run = train(given, (x, y[:, None] % 3), evaluate=(x, y[:, None] % 3), until=Stop(updates=2), workers=1)
    assert 0.0 <= run.accuracy <= 1.0
