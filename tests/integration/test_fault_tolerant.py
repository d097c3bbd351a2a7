"""`FaultTolerantTrainer`, killed at any moment: as if nothing had happened."""

import json
import math
import shutil

import numpy as np
import pytest

from edgeasync import SGD, Run
from edgeasync.async_train import FaultTolerantTrainer
from edgeasync.errors import StorageError
from edgeasync.training.numpy_models import SoftmaxModel
from tests.support.boards.disk_faults import injecting, needs_strace
from tests.support.programs.killed_training import EXAMPLES, examples, kill_at_random, main, run_once
from tests.support.size import repetitions

KILLS = repetitions("kills of a trainer")
EPOCHS = 10 + 5 * KILLS
"""Long enough for all kills."""


@pytest.mark.process
@pytest.mark.parametrize("kind", ["numpy", "custom", "layers", "onnx"])
def test_a_run_of_one_worker_ends_with_the_same_parameters_to_the_bit(kind, tmp_path):
    main(kind, tmp_path / "undisturbed", EPOCHS)
    kill_at_random(kind, tmp_path / "killed", EPOCHS, kills=KILLS)
    check_same(tmp_path / "undisturbed", tmp_path / "killed")


CALLS = [
    ("rename,renameat,renameat2", 3), ("fdatasync,pwritev2", 12), ("fsync", 9), ("sendto,sendmsg", 40),
    ("fsync", 1), ("fsync", 2), ("fdatasync,pwritev2", 1), ("rename,renameat,renameat2", 9),
    ("writev,pwrite64,pwritev2", 5), ("unlink,unlinkat", 1),
]  # fmt: skip


@pytest.mark.process
@needs_strace
def test_so_it_does_when_killed_at_chosen_calls_to_the_disk(tmp_path):
    main("numpy", tmp_path / "undisturbed", EPOCHS)
    for calls, count in CALLS[: max(4, KILLS)]:
        run_once("numpy", tmp_path / "killed", EPOCHS, under=injecting(calls, f"signal=SIGKILL:when={count}"))
        assert not (tmp_path / "killed" / "result.npz").exists()
    run_once("numpy", tmp_path / "killed", EPOCHS)
    check_same(tmp_path / "undisturbed", tmp_path / "killed")


@pytest.mark.process
def test_several_workers_train_every_example_once_an_epoch(tmp_path):
    kill_at_random("layers", tmp_path, EPOCHS, kills=KILLS, workers=3)
    history = Run.open(tmp_path).history
    assert set(history["outcome"]) <= {"applied", "buffered"}
    for device in ("worker/0", "worker/1", "worker/2"):
        assert history["examples"][history["device"] == device].sum() == EPOCHS * EXAMPLES / 3


def check_same(undisturbed, killed):
    """Compare the parameters of two runs, and what their histories say was trained."""
    with np.load(undisturbed / "result.npz") as wanted, np.load(killed / "result.npz") as found:
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name])
    histories = [Run.open(folder).history for folder in (undisturbed, killed)]
    for column in ("version", "examples", "local_steps", "loss"):
        np.testing.assert_array_equal(histories[1][column], histories[0][column])
    assert histories[1]["examples"].sum() == EPOCHS * EXAMPLES


def train(folder, epochs, recovery="latest"):
    trainer = FaultTolerantTrainer(
        SoftmaxModel(inputs=16, classes=4), folder, checkpoint_frequency=4, recovery_strategy=recovery
    )
    return trainer.train(
        examples(),
        epochs,
        SGD(learning_rate=0.05),
        evaluate=lambda arrays: float(np.abs(arrays["layer0.weight"]).sum()),
    )


def test_a_finished_run_is_finished_and_more_epochs_continue_it(tmp_path):
    finished, again = train(tmp_path, 4), train(tmp_path, 4)
    assert (again.updates, again.version) == (finished.updates, finished.version)
    for name, array in finished.arrays.items():
        np.testing.assert_array_equal(again.arrays[name], array)
    assert train(tmp_path, 5).history["examples"].sum() == 5 * EXAMPLES


def test_a_restart_may_begin_with_a_checkpoint_or_with_the_best_model(tmp_path):
    folder, copy = tmp_path / "run", tmp_path / "copy"
    finished = train(folder, 8)
    shutil.copytree(folder, copy)
    manifests = [json.loads(path.read_text()) for path in sorted(folder.glob("checkpoint-*.json"))]
    wanted = min(manifests, key=lambda manifest: math.inf if manifest["loss"] is None else manifest["loss"])
    best = train(folder, 8, "best")
    assert (best.version, best.version < finished.version) == (wanted["version"], True), "no epoch was left"
    first = min(path.stem for path in copy.glob("checkpoint-*.json"))
    assert train(copy, 8, first).version == 0
    with pytest.raises(StorageError, match="mine: no such checkpoint"):
        train(copy, 8, "mine")
