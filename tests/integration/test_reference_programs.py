"""Programs of the toolbox, of examples/async_train and support/programs/toolbox: as processes, on small data."""

import re
from pathlib import Path

import numpy as np
import pytest

from edgeasync import Run
from edgeasync import nn as layers
from edgeasync.async_train import data, models, nn, optim
from examples.async_train.digits_idx import write_idx_digits
from tests.support.models.one_loop import one_loop
from tests.support.programs.processes import free_address, until
from tests.support.size import repetitions

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples/async_train"
MORE = ROOT / "tests/support/programs/toolbox"
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
    """Return the accuracy, in percent, that one loop with these steps reaches in any order of the examples."""
    train, test = (data.MNIST(folder / "data", train=train, transform=transform) for train in (True, False))

    def network():
        return nn.Sequential(nn.Flatten(), *(layers or (nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))))

    return 100 * one_loop(network, train, test, optimizer, epochs=epochs, batch_size=batch_size)


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
    history = Run.open(tmp_path / "ckpt").history
    assert min(seen) >= goal - 3 * POINT, (seen, [worker.stderr for worker in workers], list(history))
    assert set(history["local_steps"]) == {4}
    assert history["examples"].sum() == EPOCHS * 1400, "every example is trained once an epoch"
    assert len(list((tmp_path / "ckpt").glob("checkpoint*"))) >= 2
    for worker in workers:
        told = [line for line in worker.stderr.splitlines() if line.startswith("batch ")]
        assert len(told) == 4, "of 440 batches"
        assert "accuracy" in told[0]


def run_ranks(start, name, *arguments, **environment):
    """Run a program twice, as torchrun does; return the processes."""
    port = free_address().rpartition(":")[2]
    return [
        start(name, *arguments, RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **environment)
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


def test_every_class_in_one_process(start, tmp_path):
    program = start(MORE / "one_process.py", tmp_path / "data")
    assert program.wait() == 0, program
    found = {
        name: float(share)
        for name, share in re.findall(r"^([\w -]+): ([\d.]+)%$", "\n".join(program.lines), re.MULTILINE)
    }
    with_momentum = alone(tmp_path, lambda parameters: optim.SGD(parameters, lr=0.02, momentum=0.9), epochs=10)
    goals = {
        "server": with_momentum,
        "accumulated": with_momentum,
        "accumulated by size": with_momentum,
        "fault-tolerant": alone(tmp_path, lambda parameters: optim.Adam(parameters, lr=0.002), epochs=10),
        "warm-up": alone(tmp_path, lambda parameters: optim.SGD(parameters, lr=0.1), epochs=40),
    }
    assert found.keys() == goals.keys()
    for name, goal in goals.items():
        assert found[name] >= goal - POINT, name
    told = program.stderr.splitlines()
    assert sum(line.startswith("batch ") for line in told) == 2 * 2, (
        "of 220 batches, and nothing configures logging"
    )
    fallen = {line.partition(":")[0] for line in told if "device is ignored" in line}
    assert fallen == {"AsyncWorker", "AsyncGradientAccumulator", "FaultTolerantTrainer"}


def write_pictures(folder, side, counts):
    """Write coloured pictures in noise, of several shapes and with a folder for each of three colours."""
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for split, count in counts.items():
        for number, colour in enumerate(("red", "green", "blue")):
            (folder / split / colour).mkdir(parents=True)
            for each in range(count):
                height, width = random.integers(side, 2 * side, 2)
                pixels = random.normal(90.0, 40.0, (height, width, 3))
                pixels[..., number] += 40.0
                picture = image.fromarray(pixels.clip(0, 255).astype(np.uint8))
                picture.save(folder / split / colour / f"{each}.png")
    return folder


def put_model(home, network, side):
    """Write a model where `resnet50(pretrained=True)` looks for it."""
    path = home / ".cache/edgeasync/models/resnet50.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(layers.to_onnx(network, (3, side, side)).SerializeToString())


def small_network():
    return layers.Sequential(
        layers.Conv2d(3, 8, 3), layers.BatchNorm2d(8), layers.ReLU(), layers.GlobalAvgPool(), layers.Linear(8, 3)
    )


NETWORKS = {"small": (small_network, 24, 10)}
if repetitions("toolbox programs at full size"):
    NETWORKS["resnet50"] = (lambda: models.resnet50(classes=3, side=64).layers, 64, 2)


@pytest.mark.parametrize("size", NETWORKS)
def test_folders_of_pictures(start, tmp_path, size):
    network, side, epochs = NETWORKS[size]
    data_folder = write_pictures(tmp_path / "pictures", side, {"train": 32, "val": 20})
    put_model(tmp_path, network(), side)
    ranks = run_ranks(start, MORE / "pictures.py", data_folder, side, epochs, HOME=tmp_path)
    found = accuracies(*ranks)
    assert all(sum(line.startswith("epoch ") for line in rank.lines) == epochs for rank in ranks)
    assert size != "small" or found[0] >= 100.0 - POINT, "one loop finds all: a colour is the mean of many pixels"
