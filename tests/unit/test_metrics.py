"""Metrics of a device: against formulas over single examples, over batches of any size; and mistakes."""

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync import losses, metrics
from edgeasync.errors import ConfigError
from edgeasync.metrics import F1, MAE, Accuracy, Meter, TopK, find_metrics

seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("module", [losses, metrics])
def test_the_examples_in_docstrings_run(module):
    failed, run = doctest.testmod(module)
    assert (failed, run > 5) == (0, True)


def measured(kinds, scores, targets, parts, **options):
    """Add the examples up in parts."""
    meter = Meter(kinds, **options)
    for chosen in np.array_split(np.arange(len(targets)), parts):
        meter.add(scores[chosen], targets[chosen])
    return meter.take()


def f1(said, meant):
    """Return twice the hits over all that was said or meant."""
    return 2 * (said & meant).sum() / (said.sum() + meant.sum())


@given(seeds, st.integers(1, 7), st.sampled_from([(), (2, 3)]), st.sampled_from([None, 2, 9]))
def test_metrics_of_classes(seed, parts, places, ignored):
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=(20, 4, *places)).astype(np.float32)
    labels = generator.integers(0, 4, (20, *places))
    labels[0] = 1  # one at least counts
    if ignored is not None:
        labels[1::3] = ignored
    found = measured([Accuracy(), TopK(k=2), F1()], scores, labels, parts, ignored_label=ignored)
    flat, of = np.moveaxis(scores, 1, -1).reshape(-1, 4), labels.ravel()
    counts = of != ignored
    flat, of = flat[counts], of[counts]
    said = flat.argmax(1)
    classes = [f1(said == one, of == one) for one in range(4) if one in said or one in of]
    among = [label in np.argsort(row)[-2:] for row, label in zip(flat, of, strict=True)]
    expected = {"accuracy": (said == of).mean(), "top_2": np.mean(among), "f1": np.mean(classes)}
    assert found == pytest.approx(expected, abs=1e-12)


@given(seeds, st.integers(1, 7))
def test_metrics_of_yes_or_no_and_of_values(seed, parts):
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=(20, 3)).astype(np.float32)
    answers = generator.integers(0, 2, (20, 3)).astype(np.float32)
    answers[0] = 1.0
    found = measured([Accuracy(), F1()], scores, answers, parts)
    said, meant = scores > 0, answers > 0.5
    assert found == pytest.approx({"accuracy": (said == meant).mean(), "f1": f1(said, meant)})
    found = measured([MAE()], scores, answers, parts)
    assert found == pytest.approx({"mae": np.abs(scores.astype(np.float64) - answers).mean()}, rel=1e-6)


@pytest.mark.parametrize("labels", [np.array([1, 1], np.uint8), [True, True], np.array([1, 1], np.int32)])
def test_class_numbers_are_of_any_type_of_whole_numbers(labels):
    kinds = [Accuracy(), TopK(k=1), F1()]
    found = measured(kinds, np.array([[0.1, 0.9], [0.8, 0.2]]), np.asarray(labels), 1)
    assert found == measured(kinds, np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1]), 1)


def test_yes_or_no_answers_may_be_truth_values():
    meter = Meter([Accuracy()])
    meter.add([[1.0], [-1.0]], [True, True])
    assert meter.take() == {"accuracy": 0.5}


def test_what_was_taken_is_gone_and_nothing_is_no_metric():
    meter = Meter([Accuracy(), F1()], ignored_label=9)
    assert meter.take() == {}
    meter.add([[1.0, 0.0]], [9])
    assert meter.take() == {}
    meter.add([[1.0, 0.0]], [0])
    assert meter.take() == {"accuracy": 1.0, "f1": 1.0}
    assert meter.take() == {}


def test_scores_that_are_no_numbers_are_never_right():
    meter = Meter([TopK(k=2)])
    meter.add(np.full((1, 3), np.nan, np.float32), [1])
    assert meter.take() == {"top_2": 0.0}


@pytest.mark.parametrize(
    ("settings", "loss", "words"),
    [
        (
            ["mae"],
            "cross_entropy",
            "mae does not apply to the loss cross_entropy; choose from accuracy, top_k, f1",
        ),
        (
            [TopK()],
            "bce_with_logits",
            "top_5 does not apply to the loss bce_with_logits; choose from accuracy, f1",
        ),
        (["accuracy"], "mse", "accuracy does not apply to the loss mse; choose from mae"),
        (["top_k", TopK(k=5)], "cross_entropy", "metrics contains top_5 twice"),
    ],
)
def test_metrics_that_do_not_fit(settings, loss, words):
    with pytest.raises(ConfigError, match=words):
        find_metrics(settings, loss)


@pytest.mark.parametrize("given", ["precision", [TopK(k=0)], [3], ["f1"] * 9, [Accuracy], object()])
def test_what_is_no_metric_is_one_line(given):
    with pytest.raises(ConfigError) as caught:
        metrics.check_metrics(given, "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (losses.CrossEntropy(label_smoothing=1.5), "label_smoothing"),
        (losses.CrossEntropy(class_weights=[1.0, -1.0]), "class_weights"),
        (losses.CrossEntropy(ignored_label=-100), "ignored_label"),
        (losses.Huber(delta=0), "delta"),
        (losses.Huber, "pass a name such as 'mse', or an object"),
        ("nll", "cross_entropy"),
        ({"kind": "hinge"}, "hinge"),
    ],
)
def test_what_is_no_loss_is_one_line(loss, words):
    with pytest.raises(ConfigError, match=words) as caught:
        losses.check_loss(loss, "train")
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_make_losses():
    loss = losses.CrossEntropy(class_weights=np.float32([1, 2]), label_smoothing=np.float32(0.5))
    assert losses.check_loss(loss, "train") == losses.CrossEntropy(class_weights=(1.0, 2.0), label_smoothing=0.5)
    with pytest.raises(ConfigError, match="class_weights is 'heavy'; pass a number for each class"):
        losses.CrossEntropy(class_weights="heavy")
