"""`train(engine="ray")`, on a cluster of this machine; at size `nightly` alone, which needs the extra `ray`."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from edgeasync import Run
from tests.support.size import repetitions

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0

DIGITS = """
import logging, sys
import numpy as np, psutil, ray
from edgeasync.data import load_digits
from edgeasync import Stop, nn, train

digits = load_digits()
x, y = digits.x, digits.y
killed, joins = [], []

class Watch:
    def on_join(self, event):
        joins.append(event.device)

def until(progress):
    if progress.updates >= 40 and len(joins) == 2 and not killed:
        actors = [each for each in psutil.process_iter() if "".join(each.cmdline()).startswith("ray::Actor")]
        assert len(actors) == 2, actors
        actors[0].kill()
        killed.append(actors[0].pid)
    return len(joins) == 3 and progress.epochs >= 12

network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
run = train(
    network, (x[:1400], y[:1400]), workers=2, evaluate=(x[1400:], y[1400:]), engine="ray", until=Stop(when=until),
    callbacks=[Watch()], run=sys.argv[1],
)
assert not ray.is_initialized()
print(run.accuracy, sorted(joins))
"""

FAILS = """
from edgeasync import Parameter, ParameterSpec, StepResult, Stop, train

class Fails:
    spec = ParameterSpec((Parameter("weight", (3,)),))

    def begin(self, parameters):
        pass

    def step(self):
        raise ValueError("the sensor is gone")

train({"weight": [0.0, 0.0, 0.0]}, [Fails()], until=Stop(updates=5), engine="ray")
"""


NOWHERE = """
from edgeasync import train
from edgeasync.training.numpy_models import SoftmaxModel

model, data = SoftmaxModel(inputs=1, classes=2), ([[0.0], [1.0]], [0, 1])
train(model, data, workers=1, engine="ray", ray_address="127.0.0.1:1")
"""


@pytest.fixture
def short():
    """Return a folder with a path that is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.fixture
def run_script(tmp_path, short):
    """Run a program as a user does; return what it printed."""

    def run(program, *arguments):
        (tmp_path / "script.py").write_text(program)
        (tmp_path / "t").mkdir()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        environment |= {"TMPDIR": str(tmp_path / "t"), "RAY_TMPDIR": short}
        done = subprocess.run(
            [sys.executable, "script.py", *map(str, arguments)], cwd=tmp_path, env=environment, text=True,
            capture_output=True, check=False, timeout=LIMIT_S,
        )  # fmt: skip
        left = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"]) if _is_actor(each)]
        assert left == []
        assert not [*(tmp_path / "t").glob("edgeasync-*")]
        return done

    return run


def _is_actor(process):
    return "".join(process.info["cmdline"] or ()).startswith("ray::Actor")


if repetitions("clusters of Ray"):

    def test_the_digits_are_learnt_though_an_actor_is_killed(run_script, tmp_path):
        done = run_script(DIGITS, tmp_path / "run")
        assert done.returncode == 0, done.stderr
        accuracy, *joins = done.stdout.splitlines()[-1].split(maxsplit=1)  # above it Ray has its say
        assert float(accuracy) > 0.85
        assert joins in (["['worker-1', 'worker-1', 'worker-2']"], ["['worker-1', 'worker-2', 'worker-2']"])
        assert "died, " in done.stderr
        assert "; restarting it" in done.stderr
        assert Run.open(tmp_path / "run").version > 40

    def test_what_a_worker_raises_comes_out_with_its_name(run_script):
        done = run_script(FAILS)
        assert done.returncode == 1
        assert "ValueError: the sensor is gone\nraised in worker-1" in done.stderr

    def test_a_cluster_that_is_not_there_is_told_at_once(run_script):
        done = run_script(NOWHERE)
        assert done.returncode == 1
        assert "cannot reach a Ray cluster at 127.0.0.1:1: " in done.stderr.splitlines()[-1]
