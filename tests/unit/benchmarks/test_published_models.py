"""The benchmark of published models without their libraries: what is drawn, and what counts as right."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks import published_models
from benchmarks.published_models import Draw, judge, measure, report
from benchmarks.report import Results

FAMILIES = {f"family{number}": [f"model{number}{letter}" for letter in "abcdefgh"] for number in range(9)}

BUILT = {
    "outcome": "built", "flags": [], "error": 2e-6, "torch error": 1e-6, "worst": "weight", "worst error": 1e-5,
    "worst torch error": 1e-5, "unknown": [], "missing": [], "parameters": 3, "nodes": 4, "build s": 1.0,
    "session s": 1.0, "step s": 1.0, "torch step s": 2.0,
}  # fmt: skip


@pytest.fixture
def libraries(monkeypatch):
    """Replace the child program: models of family 2 are too large, and those of family 3 are not exported."""

    def ask(python, arguments):
        command, library, *names = arguments
        if command == "families":
            return FAMILIES
        if command == "pick":
            return {"model": min(names), "parameters": 10**9 if names[0].startswith("model2") else 1000}
        if names[0].startswith("model3"):
            return {"outcome": "not exported", "reason": "torch\nfails"}
        return dict(BUILT)

    monkeypatch.setattr(published_models, "_ask", ask)


def test_a_seed_draws_the_same_models_and_another_seed_others(libraries):
    drawn = [list(Draw("timm", Path(), seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == len(FAMILIES) - 1


def test_models_that_cannot_be_drawn_are_replaced_and_listed(libraries):
    with ThreadPoolExecutor(2) as pool:
        found, draw = measure("timm", 7, Path(), 1, pool)
    assert [each["outcome"] for each in found] == ["trains"] * 7
    assert sorted(reason for name, reason in draw.left_out.items()) == [
        "not exported: torch fails", "too large: 1000 million parameters",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "trains"),
        ({"flags": ["--output scores"]}, "trains"),
        ({"flags": ["--output scores", "--loss mse"]}, "needs more flags"),
        ({"error": 2.1e-6}, "WRONG"),
        ({"error": 0.9e-6, "torch error": 1e-7}, "trains"),
        ({"worst error": 0.5}, "WRONG"),
        ({"worst error": 0.5, "worst torch error": 0.1}, "trains"),
        ({"unknown": ["mask"]}, "WRONG"),
        ({"missing": ["scale"]}, "WRONG"),
        ({"error": float("nan")}, "WRONG"),
        ({"outcome": "refused"}, "refused"),
    ],
)
def test_an_outcome_depends_on_errors_flags_and_which_parameters_are_trained(changes, outcome):
    assert judge(BUILT | changes)["outcome"] == outcome


def test_one_wrong_model_misses_a_target(libraries):
    results, models = Results(), [{"library": "timm", "model": str(number)} | BUILT for number in range(40)]
    outcomes = [judge(each) for each in models]
    outcomes[0] = judge(models[0] | {"missing": ["scale"]})
    report(outcomes, {"timm big": "too large"}, results)
    missed = [name for name, target in results.targets.items() if results.ratios[name] < target]
    assert missed == ["share whose gradients are right or refused"]
    assert results.lists["model"]["timm 0"]["reason"] == "does not train scale"
    assert results.lists["not drawn"] == {"timm big": {"reason": "too large"}}
