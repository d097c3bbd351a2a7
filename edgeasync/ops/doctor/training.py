"""Checks whether the model can be trained on a device's data, and measures a step."""

from pathlib import Path

import numpy as np

from edgeasync.config import expanded
from edgeasync.data.dataset import Dataset
from edgeasync.errors import ConfigError, EdgeAsyncError, GraphError
from edgeasync.graphs.step_process import time_steps
from edgeasync.ops.doctor.finding import StepFinding, ok, told, warn
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.optimizers import SGD
from edgeasync.regular_file import read_regular
from edgeasync.training.numpy_models import Model
from edgeasync.training.onnx_session import Provider, open_session
from edgeasync.training.onnx_trainer import GRADIENT, NEXT, OnnxTrainer
from edgeasync.training.plan import LocalTraining, TrainingPlan
from edgeasync.training.trainer import Trainer

STEP_S_SLOW = 10.0

MOTIONLESS = LocalTraining(optimizer=(SGD(learning_rate=1e-30),))
"""Training settings of the measured steps. The learning rate is too small to change the model."""


def find_graph(state: Path) -> Path | None:
    """Return the training graph that the device received last, or `None` if none is readable."""
    try:
        files = sorted(state.glob("graphs/*.onnx"), key=lambda file: file.stat().st_mtime_ns)
    except PermissionError:
        return None
    return files[-1] if files else None


def examine_step(
    dataset: Dataset | None, model: Model | Path | None, provider: Provider, threads: int
) -> StepFinding:
    """Train a few steps and return their duration. `model` may be the path of a training graph."""
    if dataset is None:
        return StepFinding(warn("step", "not measured: no data", "fix the problem in the line 'data'"), 0)
    if model is None:
        cure = "pass --model GRAPH.onnx (from 'edgeasync model build'), or let the device join its hub once"
        return StepFinding(warn("step", "not measured: the model is unknown", cure), 0)
    try:
        trainer = _make_trainer(model, dataset, provider, threads)
        seconds = _time_steps(trainer)
    except EdgeAsyncError as error:
        return StepFinding(told("step", error), 0)
    nbytes = 4 * trainer.spec.length
    shown = f"the data fits the model, and a step takes {duration(seconds)}"
    if seconds > STEP_S_SLOW:
        cure = "set micro_batch_size, use a smaller model, or accept few local steps per update"
        return StepFinding(warn("step", shown, cure), nbytes)
    return StepFinding(ok("step", shown), nbytes)


def _make_trainer(model: Model | Path, dataset: Dataset, provider: Provider, threads: int) -> Trainer:
    if not isinstance(model, Path):
        return TrainingPlan(model=model).make_trainer(dataset, 0)
    try:
        graph = read_regular(expanded(model))
    except OSError as error:
        raise ConfigError(f"{model}: cannot be read: {error.strerror}; pass a training graph") from error
    spec = read_spec(graph, model)
    return OnnxTrainer(graph, spec, dataset, MOTIONLESS, threads=threads, provider=provider)


def read_spec(graph: bytes, path: Path) -> ParameterSpec:
    """Return the spec of a training graph, derived from the names of its inputs and outputs.

    Raises `GraphError`.
    """
    session = open_session(graph, 1, "cpu")
    outputs = {entry.name for entry in session.get_outputs()}
    shapes = {entry.name: tuple(entry.shape) for entry in session.get_inputs()}
    trained = [Parameter(name, shape) for name, shape in shapes.items() if name + GRADIENT in outputs]
    moved = [Parameter(name, shape, "statistic") for name, shape in shapes.items() if name + NEXT in outputs]
    if not trained:
        raise GraphError(
            f"{path}: not a training graph; build one with 'edgeasync model build {path.name} --out FILE'"
        )
    return ParameterSpec((*trained, *moved))


def _time_steps(trainer: Trainer) -> float:
    generator = np.random.default_rng(0)
    trainer.begin((0.05 * generator.standard_normal(trainer.spec.length)).astype(np.float32))
    return time_steps(trainer.step)


def duration(seconds: float) -> str:
    """Return a duration with its unit, such as `2.1 ms`."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{float(f'{1000 * seconds:.2g}'):g} ms"
