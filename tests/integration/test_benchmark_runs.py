"""Benchmarks that `python -m benchmarks run` starts, and the records that it writes."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import surroundings
from benchmarks.records import read_records, write_record
from benchmarks.report import INTERRUPTED, Form
from benchmarks.runner import run_all
from tests.support.pages.results import made

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
FOUND = {"form": "short", "ratios": {"a": 0.5}, "targets": {"a": 1.0}, "figures": {"ms": {"row": {"ours": 1}}}}
PRINT = f"print({json.dumps(FOUND)!r})"
PROGRAMS = {
    "good": f"assert sys.argv[1:] == ['--json', '--short']; print('one round', file=sys.stderr); {PRINT}",
    "bound": f"{PRINT}; sys.exit(1)",
    "broken": f"{PRINT}; sys.exit(2)",
    "talks": "print('no result')",
    "silent": "sys.exit(1)",
    "waits": "import pathlib, time\ntry:\n    print('waiting', file=sys.stderr, flush=True)\n    time.sleep(600)\n"
    "except KeyboardInterrupt:\n    sys.exit(130)\n"
    "finally:\n    pathlib.Path('tidied').touch()",
}
"""Benchmarks that do what is to be tested."""

RUN = """
import signal, sys
from pathlib import Path
from benchmarks import surroundings
from benchmarks.runner import run_all
surroundings.LOOK_S = 0.0
signal.signal(signal.SIGINT, signal.default_int_handler)
root = Path(sys.argv[1])
sys.exit(run_all(["good", "waits", "bound"], "short", root / "results", root=root))
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Return a checkout whose benchmarks are `PROGRAMS`; no time goes into looking at the load."""
    (tmp_path / "benchmarks").mkdir()
    for name, program in {"__init__": "", **PROGRAMS}.items():
        (tmp_path / f"benchmarks/{name}.py").write_text(f"import sys\n{program}\n")
    monkeypatch.setattr(surroundings, "LOOK_S", 0.0)
    return tmp_path


def test_a_run_writes_what_was_found_and_what_it_ran_on(root, capfd):
    assert run_all(["good"], Form.SHORT, root / "results", root=root) == 0
    assert [path.name for path in (root / "results").iterdir()] == ["good.json"]
    record = read_records(root / "results")["good"]
    assert (record.form, record.ratios, record.targets) == ("short", {"a": 0.5}, {"a": 1.0})
    assert record.figures == {"ms": {"row": {"ours": 1.0}}}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record.date)
    assert set(record.machine) == {"cpu", "cores", "memory", "system"}
    assert {"python", "numpy", "onnxruntime", "pyzmq", "libzmq", "edgeasync"} <= set(record.versions)
    assert set(record.load) == {"cores busy", "average"}
    assert set(record.disk) == {"file system", "kind"}
    told = capfd.readouterr().err
    assert "[1 of 1] good, short" in told
    assert "one round" in told
    assert "good: a: 0.5 is below 1" in told


def test_a_missed_bound_is_written_and_a_failure_leaves_the_older_record(root, capsys):
    results = root / "results"
    old = made(benchmark="broken")
    write_record(old, results)
    assert run_all(["bound", "broken", "talks", "silent", "good"], Form.SHORT, results, root=root) == 1
    records = read_records(results)
    assert set(records) == {"bound", "broken", "good"}
    assert records["broken"] == old
    last = capsys.readouterr().err.splitlines()[-2:]
    assert last == ["missed a bound: bound", "failed: broken, talks, silent"]


def test_ctrl_c_ends_the_benchmark_that_runs_and_keeps_what_was_written(root):
    command = [sys.executable, "-c", RUN, str(root)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
        for line in run.stderr:
            if line == "waiting\n":
                run.send_signal(signal.SIGINT)
                break
        assert run.stderr.read() == "interrupted; written before: good\n"
    assert run.returncode == INTERRUPTED
    assert (root / "tidied").exists()
    assert set(read_records(root / "results")) == {"good"}
