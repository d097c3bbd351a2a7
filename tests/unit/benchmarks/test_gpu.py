"""The GPU benchmark without a GPU: cases that fail or hang, what they are judged by, and where it cannot run."""

import json
import sys

import pytest

from benchmarks import gpu, runner, surroundings
from benchmarks.__main__ import run_benchmark
from benchmarks.report import UNFIT, Results
from benchmarks.runner import run_one

GOOD = {
    "joined over alone": 0.98,
    "held up %": 2.0,
    "copies an exchange": 2.0,
    "ms a step alone": 10.1,
    "accuracy alone %": 96.0,
    "accuracy joined %": 95.5,
    "steps/s joined": 98.0,
}


def python(program):
    return [sys.executable, "-c", program]


def test_a_case_that_fails_or_hangs_is_told_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "CASE_S", 3.0)
    commands = {
        "float32": python(f"import json; print('a library speaks'); print(json.dumps({GOOD!r}))"),
        "jax": python("raise SystemExit('no such device')"),
        "fleet": python("import time; print('{}', flush=True); time.sleep(60)"),
        "agent": python("pass"),
        "tutorial": python("print('no JSON')"),
    }
    partial = tmp_path / "partial.json"
    found = gpu.measure(list(commands), commands, 60.0, partial)
    assert found["float32"] == GOOD
    assert found["jax"] == "exit code 1: no such device"
    assert found["fleet"] == "exit code none after 3 s: "
    assert found["agent"] == "exit code 0: "
    assert "Expecting value" in found["tutorial"]
    assert json.loads(partial.read_text()) == found
    assert "[2 of 5] jax; " in capsys.readouterr().err


def test_a_case_without_time_is_left_out():
    assert gpu.measure(["jax"], {}, 1.0) == {"jax": "there was no time left for it"}


def test_a_case_that_failed_misses_its_bounds_and_others_have_none():
    results = Results()
    gpu.judge({"jax": "no such device", "fleet": "it hangs", "agent": {"copies an exchange": 2.0}}, results)
    assert [results.ratios[name] for name in results.targets] == [0.0] * 5
    assert results.figures["cases that failed"] == {"jax": {"failed": 1.0}, "fleet": {"failed": 1.0}}


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(surroundings, "gpu", dict)


def test_without_a_gpu_it_ends_with_2_and_one_sentence(without_gpu, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    assert end.value.code == UNFIT == 2
    assert capsys.readouterr().err.splitlines() == [
        "this benchmark needs an NVIDIA GPU, but this machine's driver lists none"
    ]


def test_what_this_machine_cannot_run_has_not_failed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runner, "_run", lambda *_: (UNFIT, ""))
    assert run_one("gpu", "full", tmp_path, surroundings.ROOT) == "not for this machine"
    assert run_one("scale", "full", tmp_path, surroundings.ROOT) == "failed"
    assert runner.run_all(["gpu"], "full", tmp_path) == 0
    assert "not for this machine: gpu" in capsys.readouterr().err
    assert not run_benchmark("scale", ["--what"], quietly=True)
