"""`train_locally`: a hub and its agents in one process, over ZeroMQ's in-process transport."""

import asyncio

import numpy as np
import pytest
from sklearn.datasets import load_digits

from edgeasync import (
    Dataset,
    EdgeAsyncError,
    GradientTrainer,
    HubCoreSettings,
    StepResult,
    StopCondition,
    batches,
    dirichlet,
    load_model,
    train_locally,
)
from edgeasync.errors import ConfigError, ModelMismatchError
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.runtime.model_file import MODEL_FILE
from edgeasync.training.numpy_models import MlpModel, SoftmaxModel
from tests.support.processes import PATIENCE_S

pytestmark = pytest.mark.asyncio

SMALL = SoftmaxModel(inputs=4, classes=2)
DATA = Dataset.of(np.eye(4), [0, 1, 0, 1])
ONE_BY_ONE = Policy(aggregate=ImmediateAggregator(), optimizer=(SGD(),), frequency=FixedFrequency(local_steps=16))


def trainer_of(model, data, seed=0):
    return GradientTrainer(model.spec, model.gradient, [SGD(learning_rate=0.1)], batches(data, 32, seed))


class Failing:
    """A trainer that works for a while, then raises."""

    spec = SMALL.spec

    def __init__(self, error):
        self._error = error
        self._steps = 0

    def begin(self, parameters):
        pass

    def step(self):
        self._steps += 1
        if self._steps > 40:
            raise self._error
        return StepResult(1.0, 1)


class Solver:
    """A trainer that gets enough local steps to solve its problem every time."""

    spec = SMALL.spec

    def __init__(self, solution):
        self._solution = solution

    def begin(self, parameters):
        self._parameters = parameters

    def step(self):
        loss = float(np.square(self._parameters - self._solution).mean())
        self._parameters[:] = self._solution
        return StepResult(loss, 1)


@pytest.mark.parametrize("policy", [None, ONE_BY_ONE], ids=["default", "one by one"])
async def test_three_agents_learn_the_digits(tmp_path, policy):
    digits = load_digits()
    data = Dataset.of((digits.data / 16).astype(np.float32), digits.target)
    order = np.random.default_rng(0).permutation(len(data))
    held_out, rest = data.take(order[:360]), data.take(order[360:])
    model = MlpModel(inputs=64, hidden=(64,), classes=10)
    parts = dirichlet(rest, 3, 0.5, 0, examples_min=32)
    events = []

    async with asyncio.timeout(PATIENCE_S):
        vector, core = await train_locally(
            [trainer_of(model, part, seed) for seed, part in enumerate(parts)],
            model.initial(0),
            tmp_path,
            updates=300,
            policy=policy,
            on_report=lambda report: events.append(report.event),
        )

    assert (model.predict(vector, held_out.x) == held_out.y).mean() >= 0.9
    if policy is ONE_BY_ONE:
        assert core.updates_applied == core.version == 300
    else:  # three are folded at once at most
        assert 300 <= core.updates_applied < 303
        assert core.updates_applied / 3 <= core.version < core.updates_applied
    assert sum(member.updates_applied for member in core.members.members.values()) == core.updates_applied
    assert core.messages_refused == core.duplicates == core.updates_rejected == 0
    core.check()
    saved, version = load_model(tmp_path / MODEL_FILE, model.spec)
    assert version == core.version
    assert np.array_equal(saved, vector)
    assert events.count("joined") == 3
    assert events[-1] == "finished"


async def test_devices_that_solve_their_problem_in_every_interval_do_not_make_the_default_diverge(tmp_path):
    solution = np.linspace(-1.0, 1.0, SMALL.spec.length, dtype=np.float32)
    events = []
    async with asyncio.timeout(PATIENCE_S):
        vector, core = await train_locally(
            [Solver(solution) for _ in range(3)],
            np.zeros(SMALL.spec.length, np.float32),
            tmp_path,
            updates=300,
            on_report=lambda report: events.append(report.event),
        )
    assert np.abs(vector - solution).max() < 1e-2
    assert "alarm" not in events
    assert core.updates_rejected == 0


async def test_a_second_call_goes_on_from_the_run(tmp_path):
    for updates in (10, 20, 20):
        async with asyncio.timeout(PATIENCE_S):
            _, core = await train_locally(
                [trainer_of(SMALL, DATA)], np.zeros(SMALL.spec.length, np.float32), tmp_path, updates=updates
            )
        assert updates <= core.updates_applied < updates + 3


async def test_a_run_that_is_finished_is_not_trained_further(tmp_path):
    found = []
    for _ in range(2):
        async with asyncio.timeout(PATIENCE_S):
            model, core = await train_locally(
                [trainer_of(SMALL, DATA)], np.zeros(SMALL.spec.length, np.float32), tmp_path, updates=10
            )
        found.append((model.tobytes(), core.updates_applied))
    assert found[0] == found[1]


async def test_it_needs_a_trainer_and_updates(tmp_path):
    with pytest.raises(ValueError, match="at least one trainer"):
        await train_locally([], np.zeros(10, np.float32), tmp_path, updates=1)
    with pytest.raises(ValueError, match="updates is 0; give 1 or more"):
        await train_locally(
            [trainer_of(SMALL, DATA)], np.zeros(SMALL.spec.length, np.float32), tmp_path, updates=0
        )


async def test_the_initial_model_must_fit(tmp_path):
    with pytest.raises(ModelMismatchError, match="10 values"):
        await train_locally([trainer_of(SMALL, DATA)], np.zeros(9, np.float32), tmp_path, updates=1)


@pytest.mark.parametrize(
    "error",
    [StopIteration(), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), GeneratorExit()],
    ids=lambda error: type(error).__name__,
)
async def test_a_trainer_may_raise_what_no_task_can(tmp_path, error):
    trainers = [trainer_of(SMALL, DATA), Failing(error), trainer_of(SMALL, DATA)]
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(EdgeAsyncError, match=rf"raised {type(error).__name__}.*test_local.py.*in step"):
            await train_locally(trainers, SMALL.initial(0), tmp_path, updates=10**9)
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_batches_that_come_to_their_end_are_a_clear_error(tmp_path):
    trainer = GradientTrainer(SMALL.spec, SMALL.gradient, [SGD(learning_rate=0.1)], iter([(DATA.x, DATA.y)] * 3))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(EdgeAsyncError, match="never end"):
            await train_locally([trainer], SMALL.initial(0), tmp_path, updates=10**9)


@pytest.mark.parametrize("error", [ValueError("the sensor is gone"), EdgeAsyncError("no more data")], ids=repr)
async def test_what_a_trainer_raises_comes_out(tmp_path, error):
    trainers = [trainer_of(SMALL, DATA), Failing(error), trainer_of(SMALL, DATA)]
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(type(error), match=str(error)):
            await train_locally(trainers, SMALL.initial(0), tmp_path, updates=10**9)
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_a_trainer_of_another_model_is_refused(tmp_path):
    other = SoftmaxModel(inputs=4, classes=3)
    trainers = [trainer_of(SMALL, DATA), trainer_of(other, DATA)]
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ModelMismatchError, match="not the hub's"):
            await train_locally(trainers, SMALL.initial(0), tmp_path, updates=10**9)


async def test_training_that_is_cancelled_leaves_the_newest_model(tmp_path):
    loop, well_on = asyncio.get_running_loop(), asyncio.Event()
    trainer = trainer_of(SMALL, DATA)
    step, steps = trainer.step, []

    def watched():
        steps.append(step())
        if len(steps) == 200:
            loop.call_soon_threadsafe(well_on.set)
        return steps[-1]

    trainer.step = watched
    training = asyncio.create_task(
        train_locally([trainer], SMALL.initial(0), tmp_path, updates=10**9, policy=ONE_BY_ONE)
    )
    async with asyncio.timeout(PATIENCE_S):
        await well_on.wait()
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    saved, version = load_model(tmp_path / MODEL_FILE, SMALL.spec)
    assert version > 0
    told = []
    async with asyncio.timeout(PATIENCE_S):
        await train_locally([trainer], saved, tmp_path, updates=1, on_report=told.append)
    (resumed,) = (report.detail for report in told if report.event == "resumed")
    assert resumed.startswith(f"version {version}, ")


@pytest.mark.parametrize(("updates", "stop"), [(60, 20), (20, 60)])
async def test_it_ends_at_the_first_of_its_updates_and_the_settings_condition(tmp_path, updates, stop):
    settings = HubCoreSettings(stop=StopCondition(updates=stop))
    async with asyncio.timeout(PATIENCE_S):
        _, core = await train_locally(
            [trainer_of(SMALL, DATA)], SMALL.initial(0), tmp_path,
            updates=updates, settings=settings, policy=ONE_BY_ONE,
        )  # fmt: skip
    assert core.updates_applied == 20


async def test_a_condition_on_the_loss_ends_it(tmp_path):
    settings = HubCoreSettings(stop=StopCondition(loss=1e9), evaluate_every_updates=5)
    async with asyncio.timeout(PATIENCE_S):
        _, core = await train_locally(
            [trainer_of(SMALL, DATA)], SMALL.initial(0), tmp_path,
            updates=100, settings=settings, policy=ONE_BY_ONE,
        )  # fmt: skip
    assert core.updates_applied == 5


async def test_a_condition_that_nothing_here_measures_is_refused(tmp_path):
    settings = HubCoreSettings(stop=StopCondition(accuracy=0.9))
    with pytest.raises(ConfigError, match=r"stop\.accuracy"):
        await train_locally([trainer_of(SMALL, DATA)], SMALL.initial(0), tmp_path, updates=5, settings=settings)
