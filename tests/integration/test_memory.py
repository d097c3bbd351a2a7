"""A process with less address space than a step on its batch needs: it computes the batch in parts, and trains."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

PROGRAM = """
import json, logging, resource, sys
import numpy as np
from edgeasync import SGD, Dataset, OnnxTrainer, nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import EdgeAsyncError
from edgeasync.training.free_memory import field_bytes
from edgeasync.training.micro_batches import ThisMachine
from pathlib import Path

limit, blind, norm = int(sys.argv[1]), sys.argv[2] == "blind", sys.argv[3] == "norm"
logging.basicConfig(stream=sys.stderr)
features = nn.Conv2d(1, 32, 5, padding=2), *([nn.BatchNorm2d(32)] if norm else []), nn.ReLU()
layers = nn.Sequential(*features, nn.Flatten(), nn.Linear(32 * 28 * 28, 10))
built = build_training_graph(nn.to_onnx(layers, (1, 28, 28)).SerializeToString(), GraphSettings())
random = np.random.default_rng(0)
data = Dataset.of(random.normal(size=(512, 1, 28, 28)).astype(np.float32), np.arange(512) % 10)
status = Path("/proc/self/status")
before, resident = field_bytes(status, "VmSize:"), field_bytes(status, "VmRSS:")
if limit:
    resource.setrlimit(resource.RLIMIT_AS, (before + limit, before + limit))

class Blind(ThisMachine):
    def free_bytes(self):
        return 1 << 40

trainer = OnnxTrainer(
    built.model, built.spec, data, [SGD(learning_rate=0.01)], batch_size=512,
    machine=Blind() if blind else ThisMachine(),
)
vector = built.initial.copy()
try:
    trainer.begin(vector)
    losses = [trainer.step().loss for _ in range(2)]
except EdgeAsyncError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
print(json.dumps({"losses": losses, "needed": field_bytes(status, "VmHWM:") - resident}))
"""


def run(limit=0, sight="sees", kind="plain"):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(limit), sight, kind],
        capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout or "null"), done.stderr


@pytest.fixture(scope="module")
def whole():
    code, found, told = run()
    assert (code, told) == (0, "")
    return found


@pytest.mark.parametrize(("sight", "share"), [("sees", 0.5), ("blind", 1.0)], ids=["foreseen", "as it fails"])
def test_with_40_mb_less_than_a_step_needs_the_batch_is_split_and_trained(whole, sight, share):
    limit = int(share * whole["needed"]) - 40_000_000
    code, found, told = run(limit, sight)
    assert code == 0, told
    assert ("at a time" if sight == "sees" else "from now on 256") in told
    assert found["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert found["needed"] < whole["needed"] - 40_000_000


def test_a_batch_norm_that_does_not_fit_ends_with_a_code_of_its_own(whole):
    code, _, told = run(whole["needed"] - 40_000_000, "sees", "norm")
    assert (code, "the model has a batch norm" in told) == (14, True), told
