"""The names scripts may rely on; adding one is a decision, losing one breaks somebody."""

import subprocess
import sys

import edgeasync

NAMES = """
Adam Agent Dataset EdgeAsyncError GradientTrainer Hub OnnxTrainer Parameter ParameterSpec Peer Policy Run SGD
StepResult Stop Trainer Vector fetch_status join train train_async
"""
MODULES = "async_train callbacks data lora losses metrics networks nn policies"
ADAPTERS = "jax sklearn torch"
DATA = "Dataset batches dirichlet from_iterable from_samples iid load load_digits"


def test_the_public_names_are_these():
    assert sorted(edgeasync.__all__) == sorted(NAMES.split())
    assert len(edgeasync.__all__) <= 21
    assert sorted(edgeasync.data.__all__) == sorted(DATA.split())


def test_every_public_name_is_there():
    public = [*NAMES.split(), *MODULES.split()]
    assert all(hasattr(edgeasync, name) for name in public)
    assert sorted(dir(edgeasync)) == sorted([*public, *ADAPTERS.split()])


def test_a_name_is_imported_when_it_is_asked_for():
    code = "import sys, edgeasync; print(len([name for name in sys.modules if name.startswith('edgeasync')]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) == 1
