"""JAX on a fleet: trees that are trained, held for `join`, and resumed."""

import doctest

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import edgeasync
from edgeasync import Adam, Agent, Dataset, Hub, Run, Stop, join, train
from edgeasync.errors import ConfigError, DataError, ModelMismatchError
from edgeasync.jax import model, models, parameters
from edgeasync.training.plan import LocalTraining
from tests.support.programs.processes import PATIENCE_S

jnp = jax.numpy


def tree():
    draw = np.random.default_rng(2)
    return {
        "body": [jnp.asarray(draw.normal(size=(4, 8)) / 2, jnp.float32), jnp.zeros(8)],
        "head": {"weight": jnp.asarray(draw.normal(size=(8, 2)) / 3, jnp.float32)},
    }


def scores(params, x):
    weight, bias = params["body"]
    return jax.nn.relu(x @ weight + bias) @ params["head"]["weight"]


def loss(params, x, y):
    return optax.losses.softmax_cross_entropy_with_integer_labels(scores(params, x), y).mean()


def data(count=512, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return x, (x[:, 0] > x[:, 1]).astype(np.int64)


def test_a_tree_is_trained_and_given_back_as_one():
    given = model(tree(), loss, optax.adamw(0.01), predict=scores)
    run = train(given, data(), workers=2, evaluate=data(256, 1), until=Stop(epochs=12))
    assert list(run.arrays) == ["body.0", "body.1", "head.weight"]
    assert run.accuracy > 0.9
    x, y = data(256, 1)
    assert (scores(run.model, x).argmax(1) == y).mean() == pytest.approx(run.accuracy)


def test_data_of_several_inputs_is_refused():
    x, y = data(8)
    with pytest.raises(DataError, match="the data has the inputs a, b, but a single array x is expected"):
        train(model(tree(), loss, optax.sgd(0.1)), ({"a": x, "b": x}, y), until=Stop(updates=1))


def test_an_accuracy_of_several_places_is_a_share_of_them():
    x = np.random.default_rng(0).normal(size=(300, 5, 2)).astype(np.float32)
    y = x.argmax(-1)
    y[:, 0] ^= 1  # one place in five is wrong

    def places(params, x):
        return jnp.moveaxis(x * params["scale"], 2, 1)

    given = model({"scale": jnp.ones(1)}, lambda params, x, y: jnp.mean(y * 1.0), predict=places)
    prepared = given.prepare(LocalTraining())
    found = prepared.make_evaluator(Dataset.of(x, y))(prepared.initial)
    assert (found.accuracy, found.loss) == (pytest.approx(0.8), pytest.approx(y.mean()))


def test_one_update_is_what_optax_alone_does():
    x, y = data(32)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))
    prepared = model(tree(), loss, optimizer).prepare(LocalTraining(batch_size=32))
    trainer, vector = prepared.make_trainer(Dataset.of(x, y), 0, 1), prepared.initial.copy()
    alone = tree()
    for _ in range(2):  # each assignment begins with an optimizer that knows nothing
        trainer.begin(vector)
        state = optimizer.init(alone)
        for _ in range(5):
            trainer.step()
            changes, state = optimizer.update(jax.grad(loss)(alone, x, y), state, alone)
            alone = optax.apply_updates(alone, changes)
    np.testing.assert_allclose(
        prepared.restore(prepared.spec.views(vector))["body"][0], alone["body"][0], atol=1e-5
    )


def test_an_agent_trains_a_tree_in_the_hubs_order(tmp_path):
    arrays = {"head.weight": np.zeros((8, 2)), "body.1": np.zeros(8), "body.0": np.full((4, 8), 0.1)}
    hub = Hub(arrays, run=tmp_path, bind="tcp://127.0.0.1:*", until=Stop(updates=6))
    with hub, Agent(hub.address, data(), model=model(tree(), loss)) as agent:
        agent.wait(PATIENCE_S)
    assert Run.open(hub.path).arrays["head.weight"].any()


def test_a_loop_joins_by_a_holder_and_resumes(tmp_path):
    x, y = data(64)
    optimizer = optax.adam(0.05)

    @jax.jit
    def step(params, state):
        found, gradients = jax.value_and_grad(loss)(params, x, y)
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, found

    hub = Hub(model(tree(), loss), run=tmp_path / "run", bind="tcp://127.0.0.1:*")
    with hub:
        for steps in (40, 80):
            held = edgeasync.jax.params(jax.tree.map(jnp.zeros_like, tree()), optimizer.init(tree()))
            with join(
                hub.address, held, state=tmp_path / "device", keep_optimizer_state=True, timeout_s=PATIENCE_S
            ) as session:
                assert held.value["body"][0].any(), "the hub's values at once"
                for _ in range(40):
                    held.value, held.optimizer_state, found = step(held.value, held.optimizer_state)
                    session.step(float(found), len(y))
                assert session.steps == steps
    assert float(found) < 0.1
    assert int(held.optimizer_state[0].count) > 60, "but for the last steps, which an exchange did not follow"


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (lambda: model({}, loss), "params has no arrays"),
        (lambda: model({"step": jnp.zeros(1, jnp.int32)}, loss), "'step' is not a float32 array"),
        (lambda: model(tree(), loss, 0.1), "optimizer is float; pass an optimizer of optax"),
    ],
)
def test_mistakes_are_told_in_one_line(mistake, told):
    with pytest.raises(ConfigError, match=told):
        mistake()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"optimizer": Adam()},
            "optimizer does not apply to JaxModel models: pass one of optax to edgeasync.jax.model",
        ),
        (
            {"accumulation_steps": 4},
            "accumulation_steps does not apply to JaxModel models: use a larger batch_size",
        ),
        ({"micro_batch_size": "auto"}, "micro_batch_size does not apply to JaxModel models: use a smaller batch"),
        ({"metrics": ["accuracy"]}, "metrics does not apply to JaxModel models: remove them, or use evaluate"),
    ],
)
def test_what_would_be_ignored_is_refused(given, told):
    data = np.zeros((8, 4)), np.arange(8) % 2
    with pytest.raises(ConfigError, match=told):
        train(model(tree(), loss), data, until=Stop(updates=1), **given)


@pytest.mark.parametrize("module", [parameters, models])
def test_the_examples_of_the_docstrings_run(module):
    found = doctest.testmod(module, extraglobs={"edgeasync": edgeasync, "np": np})
    assert found.failed == 0
    assert found.attempted > 3


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree | {"new": jnp.zeros(2)},
        lambda tree: {"w": tree["w"]},
        lambda tree: tree | {"w": jnp.zeros((1, 2))},
        lambda tree: tree | {"w": jnp.zeros(2)},
    ],
    ids=["added", "gone", "more axes", "resized"],
)
def test_a_tree_that_is_another_than_at_join_is_told(change):
    kept = parameters.params({"w": jnp.zeros(3), "b": jnp.zeros(1)})
    kept.value = change(kept.value)
    for use in (kept.read, kept.write):
        with pytest.raises(ModelMismatchError, match="was added, removed or reshaped after join"):
            use({"w": np.zeros(3, np.float32), "b": np.zeros(1, np.float32)})
