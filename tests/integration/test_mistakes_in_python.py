"""Mistakes a person makes in Python: each ends soon, in one line that says what to do."""

import numpy as np
import pytest

import edgeasync
from edgeasync import (
    SGD,
    Agent,
    EdgeAsyncError,
    GradientTrainer,
    Hub,
    Parameter,
    ParameterSpec,
    StepResult,
    Stop,
    train,
)
from edgeasync.data import from_iterable
from edgeasync.errors import AddressError, ConfigError, DataError, HubUnreachableError, ModelMismatchError
from tests.support.parts.small_runs import ANYWHERE, MODEL
from tests.support.programs.processes import PATIENCE_S, free_address

ARRAYS = dict(MODEL.spec.views(MODEL.initial(0)))
DATA = np.eye(4), [0, 1, 0, 1]


class Trainer:
    spec = ParameterSpec((Parameter("weight", (3,)),))

    def begin(self, parameters):
        pass

    def step(self):
        return StepResult(1.0, 1)


def fit(batches):
    trainer = GradientTrainer(MODEL.spec, MODEL.gradient, [SGD(learning_rate=0.1)], iter(batches))
    train(ARRAYS, [trainer], until=Stop(updates=10**9))


def run_twice(folder):
    with Hub(MODEL, run=folder, bind=ANYWHERE) as hub:
        hub.start()


def take_a_taken_port(folder):
    with Hub(MODEL, run=folder / "one", bind=ANYWHERE) as hub, Hub(MODEL, run=folder / "two", bind=hub.address):
        pass


def wrong_trainer(folder):
    with Hub(MODEL, run=folder, bind=ANYWHERE) as hub, Agent(hub.address, trainer=Trainer()) as agent:
        agent.wait(PATIENCE_S)


NARROW = np.eye(3), np.array([0, 1, 0])


class Tensor:
    """An array of another library that numpy cannot read."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Use tensor.detach().numpy() instead.")


UNREAD = "cannot be read as a numpy array: Use tensor"
ARGUMENT = r"^train\(\) got an unexpected keyword argument 'wrkers'; did you mean workers\?"

MISTAKES = {
    "wrong spec": (
        wrong_trainer,
        ModelMismatchError,
        "differs from the hub's .*: use the same parameter names and shapes",
    ),
    "empty loader": (
        lambda _: fit([]),
        EdgeAsyncError,
        "the batches have ended; a trainer needs an endless iterator",
    ),
    "wrong batch": (
        lambda _: fit([NARROW] * 99),
        DataError,
        "use batches with 4 features per example, and one label",
    ),
    "two runs of an object": (run_twice, EdgeAsyncError, "has already run; create another one to run again"),
    "port taken": (
        take_a_taken_port,
        AddressError,
        "cannot listen on .*: Address already in use.*; stop the program",
    ),
    "unknown name": (lambda _: edgeasync.trian, AttributeError, "no attribute 'trian'; did you mean train?"),
    "negative seed": (
        lambda _: train(MODEL, DATA, seed=-1),
        ConfigError,
        "seed is -1; pass an integer from 0",
    ),
    "seed": (lambda _: train(MODEL, DATA, seed=1.5), ConfigError, "seed is 1.5; pass an integer"),
    "seed of a hub": (lambda _: Hub(MODEL, run="r", seed=-1).start(), ConfigError, "seed is -1; pass an integer"),
    "tensor": (lambda _: train(MODEL, (Tensor(), DATA[1])), DataError, f"the data: x {UNREAD}"),
    "parameter": (
        lambda _: train({"w": Tensor()}, [Trainer()], until=Stop(updates=1)),
        ConfigError,
        f"'w' {UNREAD}",
    ),
    "batch": (
        lambda _: fit([np.eye(3)]),
        DataError,
        r"expected batches \(x, y\) of arrays, got ndarray; yield such pairs",
    ),
    "unknown argument": (lambda _: train(MODEL, DATA, wrkers=2), TypeError, ARGUMENT),
    "missing argument": (lambda _: train(MODEL), TypeError, r"^train\(\) missing a required argument: 'data'$"),
    "no samples": (lambda _: from_iterable([], 9), DataError, "has no samples; it needs at least one"),
    "far away": (lambda _: Agent("tcp://192.0.2.7:1", DATA).start(), AddressError, r"set insecure=True \(--insec"),
}


@pytest.mark.parametrize(("make", "error", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_that_says_what_to_do(make, error, words, tmp_path):
    with pytest.raises(error, match=words) as caught:
        make(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_hub_out_of_reach_is_waited_for_until_a_timeout(caplog):
    address, told = free_address(), []
    agent = Agent(address, DATA, timeout_s=5.0, on_report=lambda report: told.append(report.event))
    with (
        pytest.raises(
            HubUnreachableError, match=rf"within 5 s: since .*{address}: connection refused, start the hub"
        ),
        agent,
    ):
        agent.wait(PATIENCE_S)
    assert "unreachable" in told, "it is said before five seconds are over"


def test_a_timeout_is_over_once_a_hub_has_answered(tmp_path):
    with Hub(MODEL, run=tmp_path, bind=ANYWHERE, until=Stop(updates=3)) as hub:
        with Agent(hub.address, DATA, timeout_s=PATIENCE_S) as agent:
            assert agent.wait(PATIENCE_S) == "the hub has finished training"
        assert hub.wait(PATIENCE_S).endswith("updates applied")
