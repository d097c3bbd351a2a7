"""A batch in parts is the batch, but for rounding; equal measurements choose equal sizes of parts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync import nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.data.dataset import Dataset, batches
from edgeasync.errors import ConfigError, NoMemoryError
from edgeasync.losses import CrossEntropy
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.optimizers import SGD, Adam
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.memory_fit import fitting_rows
from edgeasync.training.micro_batches import MicroBatchSize
from edgeasync.training.numpy_models import MlpModel
from edgeasync.training.plan import LocalTraining
from edgeasync.training.trainer import StepResult
from tests.support.models.gradients import forward, numbers
from tests.support.models.trainers import onnx_trainer

MLP = MlpModel(inputs=6, hidden=(8,), classes=3)
LAYERS = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))
NORMED = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
EXAMPLES = 50
X = np.random.default_rng(0).normal(size=(EXAMPLES, 6)).astype(np.float32)
Y = np.arange(EXAMPLES) % 3

losses = st.sampled_from([
    "mse", "l1", "huber", "bce_with_logits", "cross_entropy", CrossEntropy(label_smoothing=0.1),
    CrossEntropy(class_weights=(0.5, 2.0, 0.25, 1.0)), CrossEntropy(class_weights=(1.0, 0.0, 1.0, 0.0)),
    CrossEntropy(ignored_label=1), CrossEntropy(ignored_label=255, class_weights=(0.5, 2.0, 0.25, 1.0)),
])  # fmt: skip


def graph_of(layers, loss="cross_entropy", shape=(6,)):
    return build_training_graph(nn.to_onnx(layers, shape).SerializeToString(), GraphSettings(loss=loss))


GRAPHS = {}


def trained(make, initial, *, steps=4):
    vector = initial.copy()
    made = make()
    made.begin(vector)
    results = [made.step() for _ in range(steps)]
    return results, vector


def assert_alike(one, other):
    """To 1e-6 of the largest value, which is what rounding leaves of sums in another order."""
    (results, vector), (expected, whole) = one, other
    assert [result.examples for result in results] == [result.examples for result in expected]
    for found, wanted in zip(results, expected, strict=True):
        assert (found.loss is None) == (wanted.loss is None)
        assert found.loss is None or found.loss == pytest.approx(wanted.loss, rel=1e-6, abs=1e-6)
    np.testing.assert_allclose(vector, whole, rtol=0, atol=1e-6 * max(1.0, np.abs(whole).max()))


def targets(loss):
    if isinstance(loss, str) and loss != "cross_entropy":
        return np.random.default_rng(1).random((EXAMPLES, 4)).astype(np.float32)
    ignored = loss.ignored_label if isinstance(loss, CrossEntropy) else None
    return np.where(np.arange(EXAMPLES) % 5 == 4, Y if ignored is None else ignored, Y)


@given(losses, st.integers(1, 20), st.integers(1, 40), st.integers(1, 3), st.integers(0, 9))
def test_a_graph_trained_in_parts_is_trained_as_on_the_whole_batch(loss, micro, batch_size, steps, seed):
    graph = GRAPHS.setdefault(str(loss), graph_of(LAYERS, loss))
    data = Dataset.of(X, targets(loss))

    def make(**options):
        optimizer = [SGD(learning_rate=0.1, momentum=0.9)]
        return onnx_trainer(graph.model, graph.spec, data, optimizer, seed=seed, provider="cpu", **options)

    if EXAMPLES % batch_size:
        steps = 1  # at the end of an epoch several batches are not the same examples as a large one
    together = trained(lambda: make(batch_size=batch_size, accumulation_steps=steps), graph.initial, steps=1)
    in_parts = trained(
        lambda: make(batch_size=batch_size, accumulation_steps=steps, micro_batch_size=micro),
        graph.initial,
        steps=1,
    )
    whole = trained(lambda: make(batch_size=batch_size * steps), graph.initial, steps=1)
    assert_alike(in_parts, together)
    if batch_size * steps <= EXAMPLES:
        assert_alike(together, whole)


@given(st.integers(1, 20), st.integers(1, 40), st.integers(0, 9), st.booleans())
def test_a_numpy_model_in_parts_is_the_same_for_any_optimizer(micro, batch_size, seed, adam):
    data = Dataset.of(X, Y)
    # Adam's first steps divide by the gradient itself, so it gets values that are not all but zero.
    optimizer = (Adam(learning_rate=0.01, epsilon=1e-3) if adam else SGD(learning_rate=0.1, momentum=0.9),)

    def make(micro):
        local = LocalTraining(batch_size=batch_size, optimizer=optimizer, micro_batch_size=micro)
        return local.make_trainer(MLP.spec, MLP.gradient, data, seed)

    initial = MLP.initial(0)
    assert_alike(trained(lambda: make(micro), initial), trained(lambda: make(None), initial))


def test_parts_draw_the_same_examples_and_go_on_from_a_state():
    def make(seed):
        local = LocalTraining(batch_size=16, micro_batch_size=5, accumulation_steps=2)
        return local.make_trainer(MLP.spec, MLP.gradient, Dataset.of(X, Y), seed)

    first, again = make(1), make(2)
    vector = MLP.initial(0)
    first.begin(vector)
    assert [first.step().examples for _ in range(3)] == [32, 18, 32]
    again.restore({name: array.copy() for name, array in first.state().items()})
    restored = vector.copy()
    first.begin(vector)
    again.begin(restored)
    assert [first.step() for _ in range(5)] == [again.step() for _ in range(5)]
    assert np.array_equal(vector, restored)


def test_a_device_with_few_examples_takes_each_once_in_a_step():
    data = Dataset.of(X[:20], Y[:20])
    local = LocalTraining(batch_size=8, accumulation_steps=100)
    trainer = local.make_trainer(MLP.spec, MLP.gradient, data, 0)
    trainer.begin(MLP.initial(0))
    assert trainer.step().examples == 20


def test_batches_of_any_stream_are_added_up():
    spec = ParameterSpec((Parameter("w", (1,)),))

    def mean(parameters, x, y, out):
        out[:] = y.mean()
        return float(y.mean())

    stream = iter([(np.zeros((3, 1)), np.float32([1, 2, 3])), (np.zeros((1, 1)), np.float32([10]))])
    trainer = GradientTrainer(
        spec, mean, [SGD(learning_rate=1.0)], stream, accumulation_steps=2, micro_batch_size=2
    )
    vector = np.zeros(1, np.float32)
    trainer.begin(vector)
    assert trainer.step() == StepResult(4.0, 4)
    assert vector == pytest.approx(-4.0)


# -- what cannot be in parts -----------------------------------------------------------------------------------


WHOLE_ONLY = {
    "a batch norm": (
        NORMED,
        "cross_entropy",
        r"batch norm '1.running_mean' computes different statistics on parts of a batch",
    ),
    "smooth labels of classes that weigh nothing": (
        LAYERS,
        CrossEntropy(class_weights=(1.0, 0.0, 3.0, 1.0), label_smoothing=0.1),
        "label_smoothing and a class weight of 0, so parts of a batch do not add up",
    ),
}


@pytest.mark.parametrize(("layers", "loss", "words"), WHOLE_ONLY.values(), ids=WHOLE_ONLY)
@pytest.mark.parametrize(
    "options", [{"accumulation_steps": 2}, {"micro_batch_size": 4}, {"micro_batch_size": "auto"}]
)
def test_what_cannot_be_in_parts_is_refused_with_a_sentence(layers, loss, words, options):
    graph = graph_of(layers, loss)
    with pytest.raises(ConfigError, match=words):
        onnx_trainer(graph.model, graph.spec, Dataset.of(X, Y), [SGD()], batch_size=16, provider="cpu", **options)


def test_a_batch_norm_is_trained_where_a_batch_is_one_part():
    graph = graph_of(NORMED)
    data = Dataset.of(X, Y)
    made = onnx_trainer(graph.model, graph.spec, data, [SGD()], batch_size=16, micro_batch_size=16, provider="cpu")
    made.begin(graph.initial.copy())
    assert made.step().examples == 16


def test_a_fixed_batch_is_not_cut_but_added_up():
    # The largest values of the batch are subtracted, so the size in the file cannot be changed.
    parameters = {"w": numbers((6, 3)), "first": np.array([0])}
    model = forward("m = ReduceMax(x, first)\nd = Sub(x, m)\ny = MatMul(d, w)", parameters, (6,), batch=10)
    graph = build_training_graph(model, GraphSettings())

    def make(**options):
        return onnx_trainer(graph.model, graph.spec, Dataset.of(X, Y), [SGD()], provider="cpu", **options)

    with pytest.raises(ConfigError, match="has a fixed batch size of 10; remove micro_batch_size"):
        make(micro_batch_size=4)
    made = make(accumulation_steps=3)
    made.begin(graph.initial.copy())
    assert made.step().examples == 30


# -- chosen by measurements ------------------------------------------------------------------------------------


class FakeMachine:
    """Tells what a device would measure: a part takes some time and so much for each example, and so of memory."""

    def __init__(self, free_bytes, *, part_s=0.01, row_s=0.001, row_bytes=1000):
        self.free, self.part_s, self.row_s, self.row_bytes = free_bytes, part_s, row_s, row_bytes
        self.now, self.peak = 5.0, 0

    def run(self, rows):
        self.now += self.part_s + rows * self.row_s
        self.peak = max(self.peak, rows * self.row_bytes)

    def now_s(self):
        return self.now

    def free_bytes(self):
        return self.free

    def resident_bytes(self):
        return 0

    def peak_bytes(self):
        return self.peak


def sizes(machine, batch, parts=60):
    """Return the sizes that are taken one after the other, each once."""
    chosen, taken = MicroBatchSize(machine), []
    for _ in range(parts):
        rows = min(chosen.rows, batch)
        taken += [rows] * (rows not in taken)
        chosen.begin()
        machine.run(rows)
        chosen.done(rows, batch)
    return taken, chosen.rows


@pytest.mark.parametrize(
    ("machine", "batch", "found"),
    [
        (FakeMachine(10**9, part_s=0.05), 256, 256),
        (FakeMachine(10**9), 40, 32),
        (FakeMachine(10**9), 5, 8),
        (FakeMachine(70_000), 256, 32),
        (FakeMachine(1_000), 256, 8),
        (FakeMachine(10**9, part_s=0.0), 256, 8),
        (FakeMachine(10**9, part_s=1.0, row_s=0.01), 256, 8),
    ],
    ids=["whole", "most of it", "few", "memory", "little memory", "no faster", "slow"],
)
def test_a_size_is_chosen_by_speed_and_memory(machine, batch, found):
    taken, last = sizes(machine, batch)
    assert last == found
    assert taken == sorted(taken)
    assert max(taken) <= 2 * found
    again = FakeMachine(machine.free, part_s=machine.part_s, row_s=machine.row_s, row_bytes=machine.row_bytes)
    assert sizes(again, batch) == (taken, last)


def test_what_has_no_memory_is_tried_again_with_half():
    calls = []

    def gradient(parameters, x, y, out):
        calls.append(len(x))
        if len(x) > 3:
            raise MemoryError
        return MLP.gradient(parameters, x, y, out)

    data = Dataset.of(X, Y)
    made = GradientTrainer(
        MLP.spec, gradient, [SGD()], batches(data, 16, 0), micro_batch_size="auto", machine=FakeMachine(10**9)
    )
    made.begin(MLP.initial(0))
    assert made.step().examples == 16
    assert calls == [8, 4, *[2] * 8]


@pytest.mark.parametrize("fits", [3, 1, 0])
def test_a_whole_batch_that_has_no_memory_is_computed_in_parts_from_then_on(fits):
    calls = []

    def gradient(parameters, x, y, out):
        calls.append(len(x))
        if len(x) > fits:
            raise MemoryError
        return MLP.gradient(parameters, x, y, out)

    data = Dataset.of(X, Y)

    def make(gradient=gradient):
        return GradientTrainer(MLP.spec, gradient, [SGD()], batches(data, 16, 0))

    if fits:
        found = trained(make, MLP.initial(0), steps=2)
        tries, parts = ([16, 8, 4], [2] * 8) if fits == 3 else ([16, 8, 4, 2], [1] * 16)
        assert calls == [*tries, *parts, *parts]
        assert_alike(found, trained(lambda: make(MLP.gradient), MLP.initial(0), steps=2))
        return
    with pytest.raises(NoMemoryError, match="a single example") as raised:
        trained(make, MLP.initial(0), steps=1)
    assert raised.value.exit_code == 14


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("a batch norm", "the model has a batch norm, which needs the whole batch"),
        (list(WHOLE_ONLY)[1], "the model cannot be computed in parts"),
    ],
)
def test_what_cannot_be_in_parts_and_does_not_fit_is_refused_before_a_step(kind, words):
    built = graph_of(*WHOLE_ONLY[kind][:2])
    machine = Filling(9, iter([0, 8, 16]))
    made = onnx_trainer(built.model, built.spec, Dataset.of(X, Y), [SGD()], batch_size=16, machine=machine)
    with pytest.raises(NoMemoryError, match=words):
        made.begin(built.initial.copy())


def test_a_batch_that_does_not_fit_is_computed_in_parts_from_the_first_step_on():
    built = graph_of(LAYERS)

    def make(machine=None):
        return onnx_trainer(built.model, built.spec, Dataset.of(X, Y), [SGD()], batch_size=16, machine=machine)

    small = make(Filling(9, iter([0, 8, 16])))
    found = trained(lambda: small, built.initial)
    assert small._parts._size.rows == 8
    assert_alike(found, trained(make, built.initial))


class Filling:
    """A machine with this much free memory; the process has the next of these sizes whenever it is asked."""

    def __init__(self, free_bytes, sizes):
        self._free_bytes, self._sizes = free_bytes, sizes

    def free_bytes(self):
        return self._free_bytes

    def resident_bytes(self):
        return next(self._sizes)


def a_byte_each(runs):
    """Yield the size of a process that keeps a byte for each example that it once computed at the same time."""
    while True:
        yield 1000 + max(runs, default=0)


@pytest.mark.parametrize(
    ("free_bytes", "rows", "tried", "found"),
    [
        (0, 64, [], 64),  # it is not told
        (4 << 30, 64, [], 64),  # plenty
        (1000, 64, [8], 64),
        (70, 64, [8, 16, 32], 32),
        (72, 64, [8, 16, 32], 64),
        (284, 64, [8, 16, 32], 64),  # far from there it is not sure
        (285, 64, [8], 64),
        (10, 64, [8], 8),
        (1000, 5, [5], 5),
        (1000, 1000, [8, 16, 32, 64, 128, 256, 512], 512),
    ],
)
def test_how_many_examples_fit_is_foreseen_from_fewer(free_bytes, rows, tried, found):
    runs = []
    assert fitting_rows(runs.append, rows, Filling(free_bytes, a_byte_each(runs))) == found
    assert runs == tried


def test_a_run_that_has_no_memory_leaves_half():
    def run(rows):
        runs.append(rows)
        if rows > 20:
            raise NoMemoryError("full")

    runs = []
    assert fitting_rows(run, 100, Filling(60, a_byte_each(runs))) == 16
    assert runs == [8, 16, 32]


def test_this_machine_can_be_measured():
    graph = graph_of(LAYERS)
    made = onnx_trainer(
        graph.model, graph.spec, Dataset.of(X, Y), [SGD()], batch_size=48, micro_batch_size="auto", provider="cpu"
    )
    made.begin(graph.initial.copy())
    assert [made.step().examples for _ in range(4)] == [48, 2, 48, 2]
