"""The toolbox's blocks beside torch's of the same names, and with torch's modules in their place."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import edgeasync
from edgeasync import losses
from edgeasync.async_train import AsyncGradientAccumulator, FaultTolerantTrainer, data, nn, optim
from edgeasync.async_train.adapters import as_loss, as_optimizer
from edgeasync.async_train.one_machine import one_machine_policy
from edgeasync.errors import ConfigError
from examples.async_train.digits_idx import write_idx_digits


def batch(count=96, classes=3, seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=(count, 1, 8, 8)).astype(np.float32), random.integers(0, classes, count)


def ours():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3), input_shape=(1, 8, 8), seed=4
    )


def torchs():
    module = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(144, 3)
    )
    with torch.no_grad():
        for tensor, array in zip(module.parameters(), ours().parameters(), strict=True):
            tensor.copy_(torch.from_numpy(array))
    return module


def values(module):
    return np.concatenate([np.ravel(tensor.detach().numpy()) for tensor in module.parameters()])


@pytest.mark.parametrize(
    ("name", "options", "targets"),
    [
        ("CrossEntropyLoss", {}, "labels"),
        ("CrossEntropyLoss", {"weight": [1.0, 0.5, 2.0], "label_smoothing": 0.1}, "labels"),
        ("CrossEntropyLoss", {"ignore_index": 1}, "labels"),
        ("MSELoss", {}, "values"),
        ("L1Loss", {}, "values"),
        ("HuberLoss", {"delta": 0.5}, "values"),
        ("BCEWithLogitsLoss", {}, "values"),
    ],
)
def test_losses_of_arrays_and_of_tensors_are_torchs(name, options, targets):
    random = np.random.default_rng(2)
    scores = random.normal(size=(6, 3)).astype(np.float32)
    y = random.integers(0, 3, 6) if targets == "labels" else random.random((6, 3)).astype(np.float32)
    theirs = {key: torch.tensor(value) if isinstance(value, list) else value for key, value in options.items()}
    wanted = getattr(torch.nn, name)(**theirs)(torch.from_numpy(scores), torch.from_numpy(y))
    loss = getattr(nn, name)(**options)
    assert loss(scores, y) == pytest.approx(float(wanted), rel=1e-6)
    assert float(loss(torch.from_numpy(scores), y)) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        ("Adam", {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.01}),
    ],
)
def test_a_loop_of_ours_takes_the_steps_of_torchs(name, options):
    model, module, loss_fn = ours(), torchs(), nn.CrossEntropyLoss()
    optimizer = getattr(optim, name)(model.parameters(), **options)
    theirs = getattr(torch.optim, name)(module.parameters(), **options)
    for number in range(6):
        x, y = batch(16, seed=number)
        for used, network in ((optimizer, model), (theirs, module)):
            used.zero_grad()
            inputs = x if network is model else torch.from_numpy(x)
            loss_fn(network(inputs), y).backward()
            used.step()
    found = np.concatenate([np.ravel(array) for array in model.parameters()])
    assert np.abs(found - values(module)).max() < 2e-5


@pytest.mark.parametrize(
    ("stage", "theirs"),
    [
        (edgeasync.SGD(learning_rate=0.1, momentum=0.5), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5})),
        (
            edgeasync.Adam(learning_rate=0.1, beta1=0.5, beta2=0.7, epsilon=1e-3),
            (torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.7), "eps": 1e-3}),
        ),
    ],
)
def test_edgeasyncs_own_optimizers_train_a_module_as_torchs_do(stage, theirs):
    kind, options = theirs
    found = []
    for chosen in (stage, kind):
        module = torchs()
        optimizer = stage if chosen is stage else kind(module.parameters(), **options)
        accumulator = AsyncGradientAccumulator(module, accumulation_steps=1)
        for number in range(4):
            accumulator.train_step(*map(torch.from_numpy, batch(16, seed=number)), optimizer=optimizer)
        found.append(values(module))
    np.testing.assert_array_equal(*found)
    assert as_optimizer(stage).optimizer() is stage


@pytest.mark.parametrize(
    ("theirs", "meant"),
    [
        (torch.nn.CrossEntropyLoss(), losses.CrossEntropy()),
        (torch.nn.CrossEntropyLoss(ignore_index=0), losses.CrossEntropy(ignored_label=0)),
        (
            torch.nn.CrossEntropyLoss(torch.tensor([1.0, 0.5, 2.0]), label_smoothing=0.25),
            losses.CrossEntropy(class_weights=(1.0, 0.5, 2.0), label_smoothing=0.25),
        ),
        (torch.nn.MSELoss(), losses.MeanSquaredError()),
        (torch.nn.L1Loss(), losses.MeanAbsoluteError()),
        (torch.nn.BCEWithLogitsLoss(), losses.BinaryCrossEntropy()),
    ],
)
def test_a_loss_of_torch_is_edgeasyncs_with_its_arguments(theirs, meant):
    assert as_loss(theirs) == meant


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (
            torch.nn.CrossEntropyLoss(reduction="sum"),
            "CrossEntropyLoss has reduction='sum', but the loss must be a mean",
        ),
        (torch.nn.MSELoss(reduction="none"), "MSELoss has reduction='none'"),
        (
            torch.nn.BCEWithLogitsLoss(torch.ones(3)),
            "BCEWithLogitsLoss has a weight, which is supported only for torch modules",
        ),
        (torch.nn.BCEWithLogitsLoss(pos_weight=torch.zeros(1)), "BCEWithLogitsLoss has a pos_weight"),
        (torch.nn.NLLLoss(), "loss_fn is NLLLoss; for a model that is not a torch module"),
    ],
)
def test_a_loss_of_torch_without_a_counterpart_is_refused(theirs, told):
    with pytest.raises(ConfigError, match=told):
        as_loss(theirs)


def test_the_hub_has_no_momentum_where_any_group_of_an_optimizer_has_some():
    groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "momentum": 0.9}]
    both = [one_machine_policy(torch.optim.SGD(groups[:count])) for count in (1, 2)]
    assert both == [one_machine_policy(optim.SGD()), one_machine_policy(optim.SGD(momentum=0.9))]
    assert both[0] != both[1]


def test_a_loader_of_torch_has_an_optimizer_if_none_is_given(tmp_path):
    examples = torch.utils.data.TensorDataset(*map(torch.from_numpy, batch(64)))
    module = torchs()
    before = values(module)
    trainer = FaultTolerantTrainer(module, tmp_path)
    trainer.train(torch.utils.data.DataLoader(examples, batch_size=16), epochs=1)
    assert (values(module) != before).any()


WEIGHTS = torch.tensor([1.0, 0.2, 3.0])


@pytest.mark.parametrize(
    ("loss_fn", "shares"),
    [
        (torch.nn.CrossEntropyLoss(), False),
        (nn.CrossEntropyLoss(weight=[1.0, 0.2, 3.0]), False),
        (torch.nn.CrossEntropyLoss(weight=WEIGHTS), True),
        (torch.nn.BCEWithLogitsLoss(weight=WEIGHTS), True),
    ],
)
@pytest.mark.parametrize("sizes", [(32, 32, 32), (50, 30, 16)])
@pytest.mark.parametrize("own", [False, True])
def test_accumulated_gradients_of_a_module_are_those_of_the_large_batch(loss_fn, shares, sizes, own):
    x, y = batch()
    y = np.eye(3, dtype=np.float32)[y] if shares else y
    together, parts = torchs(), torchs()

    def optimizer(module):
        return optim.SGD(lr=1.0) if own else torch.optim.SGD(module.parameters(), lr=1.0)

    used = optimizer(together)
    loss = loss_fn(together(torch.from_numpy(x)), torch.from_numpy(y))
    loss.backward()
    (used.for_torch(together.parameters()) if own else used).step()
    accumulator, ends = AsyncGradientAccumulator(parts, accumulation_steps=3), np.cumsum(sizes)
    used = optimizer(parts)
    for begin, end in zip([0, *ends], ends, strict=False):
        accumulator.train_step(
            torch.from_numpy(x[begin:end]), torch.from_numpy(y[begin:end]), optimizer=used, loss_fn=loss_fn
        )
    assert accumulator.is_update_step()
    assert np.abs(values(parts) - values(together)).max() <= 1e-6


def test_a_loader_of_torch_and_one_of_ours_give_the_same_data(tmp_path):
    digits = data.MNIST(write_idx_digits(tmp_path))
    theirs = torch.utils.data.DataLoader(digits, batch_size=100)
    found, wanted = data.as_dataset(theirs), data.as_dataset(digits)
    assert np.array_equal(found.x, wanted.x)
    assert np.array_equal(found.y, wanted.y)
