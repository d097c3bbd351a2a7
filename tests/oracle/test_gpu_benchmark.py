"""The cases of the GPU benchmark, on a CPU that stands for the GPU."""

from contextlib import contextmanager

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

from benchmarks import gpu_devices, gpu_fleet, gpu_jax, gpu_torch
from benchmarks.gpu_devices import Case, Effort, open_hub
from benchmarks.report import Form

CASE = Case("cpu", Form.QUICK)


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    """Make all of it small, with the hub in this process."""
    monkeypatch.setitem(gpu_devices.EFFORTS, Form.QUICK, Effort(16, 0.0, 1, 48, 2))

    @contextmanager
    def hub_here(make, width, overlap_steps):
        with open_hub(make(width), str(tmp_path / "run"), overlap_steps) as hub:
            yield lambda: hub.address

    for module in (gpu_torch, gpu_jax):
        monkeypatch.setattr(module, "hub_process", hub_here)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "waiting"])
def test_a_module_joins(kind):
    figures = gpu_torch.waiting(CASE) if kind == "waiting" else gpu_torch.joined(Case("cpu", Form.QUICK, kind))
    assert figures["copies an exchange"] == 2.0
    values = 16 * (16 + 77) + 10
    assert figures["MB copied an exchange"] == pytest.approx(
        figures["copies an exchange"] * 4 * values / 1e6, abs=6e-4
    )
    assert figures["exchanges"] >= 1
    assert figures["accuracy joined %"] == pytest.approx(figures["accuracy alone %"], abs=3.0)
    assert figures["held up %"] < 100


def test_a_tree_of_jax_joins():
    figures = gpu_jax.joined(CASE)
    assert figures["copies an exchange"] == 2.0
    assert figures["accuracy joined %"] == pytest.approx(figures["accuracy alone %"], abs=3.0)


def test_an_agent_trains():
    figures = gpu_torch.agent(CASE)
    assert figures["copies an exchange"] == 2.0
    assert figures["accuracy joined %"] == pytest.approx(figures["accuracy alone %"], abs=5.0)


def test_the_profiler_looks_at_a_loop():
    assert gpu_torch.profiled(CASE)["waits seen an exchange"] == 0.0


def test_the_tutorial_runs():
    assert gpu_fleet.tutorial(CASE)["accuracy joined %"] > 20
