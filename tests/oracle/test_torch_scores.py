"""A module whose loss takes scores returns such: probabilities, and one score for classes, are refused at once."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import edgeasync
from edgeasync import Stop, train
from edgeasync.errors import ConfigError
from edgeasync.sdk.torch_scores import check_scores

nn, F = torch.nn, torch.nn.functional
X = np.random.default_rng(1).normal(size=(32, 4)).astype(np.float32)
LABELS, ANSWERS = np.argmax(X[:, :3], 1), (X[:, 0] > 0).astype(np.int64)


class Ends(nn.Module):
    """One layer, and what an ending makes of its scores."""

    def __init__(self, ending, classes=3, scale=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.ending = nn.Linear(4, classes), ending
        if scale is not None:
            self.layer.weight.data *= scale
            self.layer.bias.data = torch.full((classes,), 0.5)

    def forward(self, x):
        return self.ending(self, self.layer(x))


def trained(module, y, loss=None):
    return train(edgeasync.torch.model(module, loss), (X, y), workers=1, until=Stop(updates=3))


PROBABILITIES = {
    "softmax": lambda _, z: z.softmax(1),
    "sigmoid": lambda _, z: z.sigmoid(),
    "softmax by arithmetic": lambda _, z: z.exp() / z.exp().sum(1, keepdim=True),
    "root of a softmax": lambda _, z: z.softmax(1).sqrt(),
    "softmax, turned": lambda _, z: -z.softmax(1),
    "a tanh from 0 to 1": lambda _, z: (z.tanh() + 1) / 2,
    "a distance's exponential": lambda _, z: (-z.square()).exp(),
}
CLASSES = {"none": None, "torch's": nn.CrossEntropyLoss(), "a function": functools.partial(F.cross_entropy)}
OF_ANSWERS = {"torch's": nn.BCEWithLogitsLoss(), "a function": F.binary_cross_entropy_with_logits}


@pytest.mark.parametrize("loss", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("ending", PROBABILITIES.values(), ids=PROBABILITIES)
def test_probabilities_are_no_scores_of_classes(ending, loss):
    with pytest.raises(
        ConfigError, match=r"always returns values between 0 and 1, .* expects the scores before that; return t"
    ):
        trained(Ends(ending), LABELS, loss)


@pytest.mark.parametrize("loss", OF_ANSWERS.values(), ids=OF_ANSWERS)
@pytest.mark.parametrize("ending", [PROBABILITIES["sigmoid"], PROBABILITIES["a distance's exponential"]])
def test_probabilities_are_no_scores_of_answers(ending, loss):
    with pytest.raises(ConfigError, match=r"or use torch\.nn\.BCELoss"):
        trained(Ends(ending, 1), ANSWERS, loss)
    assert trained(Ends(ending, 1), ANSWERS, nn.BCELoss()).updates >= 3


@pytest.mark.parametrize("y", [ANSWERS, ANSWERS * 0], ids=["both", "only zeros"])
def test_one_score_is_refused_for_classes(y):
    with pytest.raises(ConfigError, match=r"one score per example, but cross .* torch.nn.BCEWithLogitsLoss\(\)"):
        trained(nn.Linear(4, 1), y)
    assert trained(nn.Linear(4, 1), y, nn.BCEWithLogitsLoss()).updates >= 3


LOG_SOFTMAX, SOFTMAX, SCORES = (lambda _, z: z.log_softmax(1)), PROBABILITIES["softmax"], (lambda _, z: z)
MISTAKEN = {
    "scores for logarithms": (
        SCORES,
        LABELS,
        nn.NLLLoss(),
        "not log-probabilities, .* the loss torch.nn.CrossEntropyLoss",
    ),
    "by a function": (SCORES, LABELS, functools.partial(F.nll_loss), "not log-probabilities"),
    "probabilities for logarithms": (SOFTMAX, LABELS, nn.NLLLoss(), "end the module with log_softmax"),
    "scores for probabilities": (SCORES, np.eye(3)[LABELS], nn.BCELoss(), "outside 0 to 1, .*BCEWithLogits"),
    "a sum": (
        SCORES,
        LABELS,
        nn.CrossEntropyLoss(reduction="sum"),
        "does not return the mean of a batch; .* reduction='mean'",
    ),
    "a loss for each": (
        SCORES,
        LABELS,
        functools.partial(F.cross_entropy, reduction="none"),
        "does not return the mean of a batch",
    ),
}


@pytest.mark.parametrize(("ending", "y", "loss", "told"), MISTAKEN.values(), ids=MISTAKEN)
def test_what_a_loss_of_torch_does_not_take_is_told(ending, y, loss, told):
    with pytest.raises(ConfigError, match=told):
        trained(Ends(ending), y, loss)


def test_the_advice_for_these_losses_trains():
    assert trained(Ends(LOG_SOFTMAX), LABELS, nn.NLLLoss()).updates >= 3
    assert trained(Ends(lambda _, z: (z.softmax(1) + 1e-8).log()), LABELS, F.nll_loss).updates >= 3
    assert trained(Ends(SCORES), LABELS, nn.CrossEntropyLoss()).updates >= 3
    assert trained(Ends(SCORES), np.eye(3)[LABELS], nn.BCEWithLogitsLoss()).updates >= 3


RIGHT = {
    "small scores": Ends(lambda _, z: z, scale=1e-4),
    "positive scores": Ends(lambda _, z: z.relu()),
    "log-probabilities": Ends(lambda _, z: z.log_softmax(1)),
    "probabilities in evaluation": Ends(lambda module, z: z if module.training else z.softmax(1)),
}


@pytest.mark.parametrize("module", RIGHT.values(), ids=RIGHT)
def test_scores_are_trained(module):
    assert trained(module, LABELS).updates >= 3


def test_the_look_at_scores_changes_neither_random_numbers_nor_statistics():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout())
    before, state = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
    check_scores(module, lambda tried: tried(torch.from_numpy(X)), "classes")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_module_that_does_not_run_on_other_parameters_is_left_to_training():
    def careful(module, z):
        if module.layer.weight.abs().max() > 1:
            raise ArithmeticError
        return z.softmax(1)

    assert trained(Ends(careful), LABELS).updates >= 3


def test_what_a_loss_of_ones_own_takes_is_its_own_affair():
    assert trained(Ends(PROBABILITIES["softmax"]), LABELS, lambda p, y: F.nll_loss(p.log(), y)).updates >= 3
    assert trained(Ends(PROBABILITIES["sigmoid"], 1), X[:, 0]).updates >= 3
