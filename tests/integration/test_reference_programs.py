"""The programs of the reference, which are in examples/async_train: as processes, on an IDX copy of the digits."""

import re
from pathlib import Path

import numpy as np
import pytest

from edgeasync import Run
from edgeasync.async_train import data, nn, optim
from examples.async_train.digits_idx import write_idx_digits
from tests.support.processes import free_address, until

PROGRAMS = Path(__file__).parents[2] / "examples/async_train"
EPOCHS = 20
POINT = 1.0
TRANSFORM = data.transforms.Compose([data.transforms.ToTensor(), data.transforms.Normalize((0.3,), (0.35,))])

pytestmark = pytest.mark.process


@pytest.fixture
def start(commands, tmp_path):
    """Start a program in a folder with the digits; programs leave no temporary folder."""
    write_idx_digits(tmp_path / "data")
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    def start_one(name, *arguments, **environment):
        under = [
            "env",
            "OMP_NUM_THREADS=1",
            f"TMPDIR={temporary}",
            *(f"{key}={value}" for key, value in environment.items()),
        ]
        return commands.start(*arguments, program=(PROGRAMS / name,), under=under)

    yield start_one
    assert not list(temporary.glob("edgeasync*"))


def accuracies(*programs):
    """Return the last accuracy, in percent, that each program tells; wait for all to end."""
    for program in programs:
        assert program.wait() == 0, program
    return [float(re.findall(r"accuracy: ([\d.]+)%", "\n".join(program.lines))[-1]) for program in programs]


def alone(folder, optimizer, *, epochs=EPOCHS, batch_size=32, layers=None, transform=TRANSFORM):
    """Return the accuracy, in percent, of one loop with these steps."""
    train, test = (data.MNIST(folder / "data", train=train, transform=transform) for train in (True, False))
    model = nn.Sequential(nn.Flatten(), *(layers or (nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))))
    loss_fn, used = nn.CrossEntropyLoss(), optimizer(model.parameters())
    loader = data.DataLoader(train, batch_size=batch_size, shuffle=True)
    for _ in range(epochs):
        for inputs, targets in loader:
            used.zero_grad()
            loss_fn(model(inputs), targets).backward()
            used.step()
    ((inputs, targets),) = data.DataLoader(test, batch_size=len(test))
    return 100 * float(np.mean(np.asarray(model.eval()(inputs)).argmax(1) == targets))


def with_momentum(parameters):
    return optim.SGD(parameters, lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [("adaptive_lr", ()), ("filter", ()), ("momentum_correction", ("--lr", 0.3, "--momentum", 0))],
)
def test_a_parameter_server_and_its_workers(start, tmp_path, policy, optimizer):
    address = free_address().removeprefix("tcp://")
    port = address.partition(":")[2]
    server = start("parameter_server.py", "--port", port, "--staleness-policy", policy)
    workers = [start("worker.py", "--server", address, "--part", part, *optimizer) for part in range(2)]
    found, *seen = accuracies(server, *workers)
    goal = alone(tmp_path, with_momentum)
    assert found >= goal - POINT
    assert min(seen) >= goal - 3 * POINT
    history = Run.open(tmp_path / "ckpt").history
    assert set(history["local_steps"]) == {4}
    assert history["examples"].sum() == EPOCHS * 1400, "every example is trained once an epoch"
    assert len(list((tmp_path / "ckpt").glob("checkpoint*"))) >= 2
    for worker in workers:
        told = [line for line in worker.stderr.splitlines() if line.startswith("batch ")]
        assert len(told) == 4, "of 440 batches"
        assert "accuracy" in told[0]


def run_ranks(start, name, *arguments):
    """Run a program twice, as torchrun does; return the processes."""
    port = free_address().rpartition(":")[2]
    return [
        start(name, *arguments, RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in range(2)
    ]


@pytest.mark.parametrize(("policy", "bounds"), [("iterations", (5, 5)), ("adaptive", (3, 10)), ("time", (3, 10))])
def test_averaged_models(start, tmp_path, policy, bounds):
    ranks = run_ranks(start, "model_averaging.py", "--averaging-policy", policy)
    assert accuracies(*ranks)[0] >= alone(tmp_path, with_momentum, epochs=30) - POINT
    history = Run.open(tmp_path / "ckpt").history
    for number, rank in enumerate(ranks):
        *intervals, last = [
            int(row["local_steps"]) for row in history if row["device"].startswith(f"rank-{number}")
        ]
        assert min(intervals) >= bounds[0]
        assert sum(interval > bounds[1] for interval in intervals) <= 1, "the one in which it was away"
        assert len(set(intervals)) >= 2 or bounds[0] == bounds[1]
        since = int(re.search(r"(\d+) steps since", "\n".join(rank.lines))[1])
        trained = 30 * 22 - since
        assert trained in (sum(intervals), sum(intervals) + last), "the averager and the hub count the same"
        ignored = [line for line in rank.stderr.splitlines() if "is ignored" in line]
        assert len(ignored) == len(set(ignored)) == 4


def test_bagua(start, tmp_path):
    pytest.importorskip("torch")
    assert accuracies(*run_ranks(start, "bagua.py"))[0] >= alone(tmp_path, with_momentum) - POINT
    steps = Run.open(tmp_path / "ckpt").history["local_steps"]
    assert set(steps[:20]) == {1}, "the warm-up averages after every step"
    assert len(set(steps)) > 2


def test_accumulated_gradients(start, tmp_path):
    program = start("gradient_accumulation.py")
    goal = alone(tmp_path, lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9), batch_size=64)
    assert accuracies(program)[0] >= goal - POINT
    assert program.lines[-1].startswith(f"{EPOCHS * 88 // 4} steps")


def journal_bytes(folder):
    return sum(path.stat().st_size for path in folder.glob("journal-*"))


def test_a_training_that_is_killed(start, tmp_path):
    undisturbed = start("fault_tolerant.py")
    goal = alone(tmp_path, lambda parameters: optim.Adam(parameters, lr=0.001))
    assert accuracies(undisturbed)[0] >= goal - POINT
    wanted = Run.open((tmp_path / "ckpt").rename(tmp_path / "undisturbed")).arrays
    killed = start("fault_tolerant.py")
    until(lambda: journal_bytes(tmp_path / "ckpt") > 100_000, "the training has begun")
    killed.kill()
    assert killed.lines == ["training"]
    assert accuracies(start("fault_tolerant.py")) == accuracies(undisturbed)
    for name, array in Run.open(tmp_path / "ckpt").arrays.items():
        np.testing.assert_array_equal(array, wanted[name])


def test_warm_up_and_thresholds(start, tmp_path):
    program = start("warm_up_and_monitor.py")
    goal = alone(tmp_path, lambda parameters: optim.SGD(parameters, lr=0.1), epochs=50)
    assert accuracies(program)[0] >= goal - POINT
    assert "exchanges after [5, 10] steps" in program.lines[-2]


def test_processes_train_a_class_of_a_script_without_a_main_guard(start, tmp_path):
    program = start("async_sgd.py")
    layers, plain = [nn.Linear(64, 10)], data.transforms.ToTensor()
    goal = alone(
        tmp_path, lambda parameters: optim.SGD(parameters, lr=0.1), batch_size=16, layers=layers, transform=plain
    )
    assert accuracies(program)[0] >= goal - POINT
