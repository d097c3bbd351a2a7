"""The benchmark of published models without their libraries: what is drawn, and what counts as right."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks import published_models
from benchmarks.published_models import judge, measure, report
from benchmarks.report import Results

BUILT = {
    "outcome": "built", "flags": [], "plain ratio": 2.0, "error ratio": 2.0, "error": 2e-6,
    "torch error": 1e-6, "distance": 1e-3,
    "worst": "weight", "worst ratio": 10.0, "worst error": 1e-5, "worst torch error": 1e-6, "unknown": [],
    "missing": [], "parameters": 3, "nodes": 4, "build s": 1.0, "session s": 1.0, "step s": 1.0,
    "torch step s": 2.0,
}  # fmt: skip


def test_models_that_cannot_be_exported_are_replaced_and_listed(monkeypatch):
    def ask(python, command, library, seed, what):
        if command == "draw":
            return {"models": [f"model{number}" for number in range(what)], "left out": {"vast": "too large"}}
        return {"outcome": "not exported", "reason": "torch\nfails"} if what in ("model0", "model3") else BUILT

    monkeypatch.setattr(published_models, "_ask", ask)
    with ThreadPoolExecutor(2) as pool:
        found, left_out = measure("timm", 3, Path(), 1, pool)
    assert [(each["model"], each["outcome"]) for each in found] == [
        ("model1", "trains"), ("model2", "trains"), ("model4", "trains"),
    ]  # fmt: skip
    failed = "not exported: torch fails"
    assert left_out == {"timm vast": "too large", "timm model0": failed, "timm model3": failed}


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "trains"),
        ({"flags": ["--output scores"]}, "trains"),
        ({"flags": ["--output scores", "--loss mse"]}, "needs more flags"),
        ({"error ratio": 2.1}, "WRONG"),
        ({"worst ratio": 11.0}, "WRONG"),
        ({"unknown": ["mask"]}, "WRONG"),
        ({"missing": ["scale"]}, "WRONG"),
        ({"error ratio": float("nan")}, "WRONG"),
        ({"distance": 2e-3}, "WRONG"),
        ({"outcome": "refused"}, "refused"),
    ],
)
def test_an_outcome_depends_on_errors_flags_and_which_parameters_are_trained(changes, outcome):
    assert judge(BUILT | changes)["outcome"] == outcome


def test_errors_on_any_side_have_a_target_of_their_own():
    results, models = Results(), [{"library": "timm", "model": str(number)} | BUILT for number in range(40)]
    report([judge(each | {"plain ratio": 300.0}) for each in models[:4]] + models[4:], {}, results)
    assert results.ratios["share within twice torch's error, on any side"] == 36 / 40
    assert results.targets["share within twice torch's error, on any side"] == 37 / 40


def test_one_wrong_model_misses_a_target():
    results, models = Results(), [{"library": "timm", "model": str(number)} | BUILT for number in range(40)]
    outcomes = [judge(each) for each in models]
    outcomes[0] = judge(models[0] | {"missing": ["scale"]})
    report(outcomes, {"timm big": "too large"}, results)
    missed = [name for name, target in results.targets.items() if results.ratios[name] < target]
    assert missed == ["share whose gradients are right or refused"]
    assert results.lists["model"]["timm 0"]["reason"] == "does not train scale"
    assert results.lists["not drawn"] == {"timm big": {"reason": "too large"}}
