"""Programs of the toolbox use every class with every argument that documents about such toolboxes have."""

import ast
import inspect
from pathlib import Path

import pytest

import edgeasync.async_train as toolbox
from edgeasync.async_train import communication, worker

ROOT = Path(__file__).parents[3]
PROGRAMS = [*(ROOT / "examples/async_train").glob("*.py"), *(ROOT / "tests/support/programs/toolbox").glob("*.py")]
STEP = "inputs targets optimizer loss_fn"

CALLED = {
    "ParameterServer": "model port update_rule staleness_policy staleness_lr_factor max_staleness checkpoint_dir "
    "checkpoint_frequency",
    "ParameterServer.start": "",
    "ParameterServer.wait_for_workers": "",
    "AsyncWorker": "server_address local_batch_size update_frequency device",
    "AsyncWorker.train": "dataset dataloader epochs optimizer loss_fn metrics log_frequency",
    "AsyncWorker.evaluate": "",
    "AsyncModelAverager": "model world_size rank averaging_frequency averaging_policy min_averaging_frequency "
    "max_averaging_frequency adaptation_metric communication_backend device",
    "AsyncModelAverager.train_step": STEP,
    "AsyncModelAverager.evaluate": "",
    "AsyncGradientAccumulator": "model accumulation_steps base_batch_size target_batch_size adaptive_accumulation "
    "device",
    "AsyncGradientAccumulator.train_step": STEP,
    "AsyncGradientAccumulator.is_update_step": "",
    "FaultTolerantTrainer": "model checkpoint_dir checkpoint_frequency recovery_strategy device",
    "FaultTolerantTrainer.train": "dataset epochs optimizer loss_fn",
    "AsyncTrainer": "model warm_up_epochs warm_up_sync_frequency regular_sync_frequency",
    "AsyncTrainingMonitor": "model divergence_metrics alert_threshold remediation_strategy",
    "AsyncModelAverageAlgorithm.abort": "",
    "AsyncModelAverageAlgorithm.resume": "",
    "with_edgeasync": "",
    "async_sgd": "num_workers num_epochs lr",
    "init_distributed": "backend",
    "optim.SGD": "lr momentum weight_decay",
    "optim.Adam": "lr",
    "nn.Sequential": "",
    "nn.Linear": "",
    "nn.ReLU": "",
    "nn.CrossEntropyLoss": "",
    "data.MNIST": "root train download transform",
    "data.ImageNet": "root split transform",
    "data.Subset": "",
    "data.DataLoader": "batch_size shuffle num_workers pin_memory",
    "transforms.Compose": "",
    "transforms.ToTensor": "",
    "transforms.Normalize": "mean std",
    "transforms.Resize": "",
    "transforms.CenterCrop": "",
    "transforms.RandomResizedCrop": "",
    "transforms.RandomHorizontalFlip": "",
    "models.resnet50": "pretrained",
    "cuda.is_available": "",
}
"""Each class, method and function, and the arguments that are written with their names."""

UNDER = {"with_edgeasync": "with_bagua"}
"""Names that programs call a function by."""

READ = ["last_averaging_iteration", "device"]
"""Attributes of an averager."""


def find(name):
    """Return a class, method or function of the toolbox by its name."""
    found = toolbox
    for part in name.split("."):
        found = getattr(found, part)
    return found


def used():
    """Return the names of arguments that programs write, by the last name of what they call."""
    found, read = {}, set()
    for program in PROGRAMS:
        for node in ast.walk(ast.parse(program.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
                written = {keyword.arg for keyword in node.keywords if keyword.arg}
                tables = [
                    each for each in ast.walk(ast.parse(program.read_text("utf-8"))) if isinstance(each, ast.Dict)
                ]
                if any(keyword.arg is None for keyword in node.keywords):  # from a table of the program
                    written |= {key.value for each in tables for key in each.keys if isinstance(key, ast.Constant)}
                found.setdefault(name, set()).update(written)
            elif isinstance(node, ast.Attribute):
                read.add(node.attr)
    return found, read


WRITTEN, ATTRIBUTES = used()


@pytest.mark.parametrize("name", CALLED)
def test_it_takes_these_arguments_and_a_program_writes_them(name):
    parameters = set(inspect.signature(find(name)).parameters)
    parameters |= set(communication.Averaging.__annotations__) if name == "AsyncModelAverager" else set()
    parameters |= set(worker.Training.__annotations__) if name == "AsyncWorker.train" else set()
    wanted = set(CALLED[name].split())
    assert wanted <= parameters
    called = UNDER.get(name, name.rpartition(".")[2])
    assert called in WRITTEN, "no program calls it"
    assert not wanted - WRITTEN[called], "no program writes these"


def test_programs_read_its_attributes():
    assert set(READ) <= ATTRIBUTES
